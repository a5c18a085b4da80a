"""A running predictor service, and requests with a length that follows from their prompt."""

import asyncio
import random
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from grpc import aio
from prometheus_client import CollectorRegistry

from protos.generated import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.predictor.config import PredictorConfig
from services.predictor.encoder.extract import TextEncoder
from services.predictor.interface import LAYERS
from services.predictor.service import PredictorService
from services.runtime.outcomelog.config import LogConfig
from services.runtime.tasks import background
from tests.reach import reaching, until

NAME = "foretoken.v1.Predictor"
ADD = predictor_pb2_grpc.add_PredictorServicer_to_server
PATIENT_S = 20.0  # to read prompts on a busy test machine

MEAN_LENGTHS = {  # by prompt
    "Say yes or no: is {} an even number?": 4,
    "Write a long essay about the history of the number {}.": 400,
}


@cache
def real_encoder() -> TextEncoder:
    from services.encoder.encoder import Encoder

    return Encoder.load()


class HashEncoder:
    """Fast vectors that differ by text and have no meaning."""

    head_chars = 512
    dim = 8

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        size = (LAYERS, self.dim)
        rows = np.stack([np.random.default_rng(len(text)).normal(size=size) for text in texts])
        return np.asarray(rows / np.linalg.norm(rows, axis=2, keepdims=True), np.float32)


@dataclass(frozen=True)
class Running:
    """A running service with its stub and metrics."""

    channel: aio.Channel
    stub: "predictor_pb2_grpc.PredictorAsyncStub"
    registry: CollectorRegistry
    service: PredictorService

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"foretoken_predictor_{name}", labels) or 0.0

    async def forecast(self, *inputs: predictor_pb2.ForecastInput) -> list[common_pb2.Forecast]:
        return list((await self.stub.Forecast(forecast_of(*inputs))).forecasts)

    async def improved(self, *inputs: predictor_pb2.ForecastInput) -> list[common_pb2.Forecast]:
        """Improved forecasts of requests after their prompts were read."""
        stream = self.stub.Improve(predictor_pb2.ImproveRequest())
        reported: dict[str, common_pb2.Forecast] = {}
        reader = asyncio.create_task(_gather(stream, reported, {i.request_id for i in inputs}))
        await until(lambda: self.service.listeners > 0)
        await self.forecast(*inputs)
        await asyncio.wait_for(reader, PATIENT_S)
        stream.cancel()
        await until(lambda: self.service.listeners == 0)
        return [reported[each.request_id] for each in inputs]

    async def read(self, count: int) -> None:
        """Waits until `count` prompts of running requests were read."""
        await until(lambda: self.value("read_total", of="waiting") >= count)

    async def observe(self, *outcomes: predictor_pb2.Outcome) -> int:
        message = predictor_pb2.ObserveOutcomesRequest(outcomes=outcomes)
        return (await self.stub.Observe(message)).version


async def _gather(
    stream: AsyncIterable[predictor_pb2.ImprovedForecasts],
    reported: dict[str, common_pb2.Forecast],
    wanted: set[str],
) -> None:
    async for message in stream:
        reported.update(zip(message.request_ids, message.forecasts, strict=True))
        if wanted <= set(reported):
            return


@asynccontextmanager
async def predicting(
    model: str = "history",
    log: LogConfig | None = None,
    encoder: TextEncoder | None = None,
    way: str = "in-process",
    **settings: Any,
) -> AsyncIterator[Running]:
    """Runs the service with its background tasks. Models are refitted only if settings say so."""
    given = {"cpu_share": 1, "refit_interval_s": 3_600, **settings}
    registry = CollectorRegistry()
    config = PredictorConfig(model=model, **given)
    service = PredictorService(config, registry, log or LogConfig(), encoder or HashEncoder())
    async with background(service.run()), reaching(way, NAME, ADD, service) as channel:
        yield Running(channel, predictor_pb2_grpc.PredictorStub(channel), registry, service)


def forecast_of(*inputs: predictor_pb2.ForecastInput) -> predictor_pb2.ForecastRequest:
    return predictor_pb2.ForecastRequest(inputs=inputs)


def input_of(
    request_id: str, user_input: str, instruction: str = "", answers: Sequence[int] = ()
) -> predictor_pb2.ForecastInput:
    text = common_pb2.PromptText(
        instruction=instruction, user_input=user_input, answer_tokens=answers
    )
    return predictor_pb2.ForecastInput(
        request_id=request_id, model="demo", prompt_tokens=12, max_tokens=1_000, text=text
    )


def ended(request_id: str, tokens: int, **fields: Any) -> predictor_pb2.Outcome:
    known: dict[str, Any] = {
        "model": "demo",
        "prompt_tokens": 12,
        "max_tokens": 1_000,
        "reason": common_pb2.FINISH_REASON_STOP,
    }
    return predictor_pb2.Outcome(request_id=request_id, output_tokens=tokens, **(known | fields))


def requests(
    count: int, seed: int = 0
) -> list[tuple[predictor_pb2.ForecastInput, predictor_pb2.Outcome]]:
    """Requests and outcomes with a length that follows from the prompt."""
    rng = random.Random(seed)
    pairs = []
    for number in range(count):
        prompt, mean_tokens = rng.choice(list(MEAN_LENGTHS.items()))
        request_id = f"{seed}-{number}"
        tokens = max(1, round(mean_tokens * rng.uniform(0.7, 1.3)))
        pairs.append(
            (
                input_of(request_id, prompt.format(rng.randrange(10**6))),
                ended(request_id, tokens),
            )
        )
    return pairs


def mean(forecast: common_pb2.Forecast) -> float:
    return sum(p * w for p, w in zip(forecast.points, forecast.weights, strict=True))

"""Forecasts of answers: by the predictor service, else by the lengths of recent answers."""

import asyncio
import logging
import os
import platform
import time
from collections.abc import Callable
from functools import partial

from grpc import aio

from protos.generated import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.core import Ending, Outcome
from services.forecast import Forecast, certain
from services.lengths import LengthWindow
from services.picker.config import PickerConfig
from services.picker.core.questions import Question
from services.picker.metrics import FAILED, LATE, OPEN, PickerMetrics
from services.runtime.bounded_dict import BoundedDict
from services.runtime.codecs.common import decode_forecast, encode_endings
from services.runtime.network.backoff import Backoff
from services.runtime.network.breaker import Breaker, BreakerPhase
from services.runtime.network.delivery import (
    MAX_KEPT,
    MAX_PER_CALL,
    Backlog,
    deliver,
    describe,
    follow,
)
from services.runtime.network.streams import ResponseStream

log = logging.getLogger(__name__)

MAX_MODELS = 64  # with a history of their own; the oldest is forgotten
MAX_TEXT_BYTES = 8_192  # of each part of a prompt, as the gateway sends
PAUSES = Backoff(0.25, 5.0)
OBSERVE_S = 5.0  # long, because an outcome sent twice counts twice; no request waits for it
OBSERVE_INTERVAL_S = 0.25


class History:
    """Lengths of the last answers of each model. Pure."""

    def __init__(self, first_tokens: int):
        """`first_tokens` are expected of a model's answers before any has ended."""
        self._first_tokens = first_tokens
        self._models = BoundedDict[str, LengthWindow](MAX_MODELS)

    def learn(self, outcome: Outcome) -> None:
        if outcome.model not in self._models:
            self._models[outcome.model] = LengthWindow()
        self._models[outcome.model].learn(outcome)

    def forecast(self, model: str, max_tokens: int) -> Forecast:
        window = self._models.get(model)
        if not window:  # none, or without an answer
            return certain(min(self._first_tokens, max_tokens), "first")
        return window.forecast("history").truncated(max_tokens)


class Forecasts:
    """Requests have numbers here, and at the predictor names that no other process uses. `improved`
    receives better forecasts of earlier requests."""

    def __init__(
        self,
        config: PickerConfig,
        channel: aio.Channel | None,
        metrics: PickerMetrics,
        improved: Callable[[int, Forecast], None],
    ):
        """Without a `channel` to a predictor, only history forecasts."""
        self._wait_s = config.forecast_wait_s
        self._history = History(config.first_output_tokens)
        self._predictor = predictor_pb2_grpc.PredictorStub(channel) if channel else None
        self._breaker = Breaker(config.forecast_failures_max, PAUSES)
        self._metrics = metrics
        self._improved = improved
        self._reporter = f"picker on {platform.node()}"
        self._prefix = f"picker-{os.getpid()}-{time.time_ns():x}-"
        self._max_tokens = BoundedDict[str, int](MAX_KEPT)  # of requests that were asked about
        self._endings: Backlog[Ending] = Backlog(MAX_KEPT, metrics.outcomes_dropped)

    async def forecast(
        self, number: int, question: Question, prompt_tokens: int, max_tokens: int
    ) -> Forecast:
        """A forecast within `forecast_wait_s`."""
        if self._predictor is not None:
            each = _input(self.name(number), question, prompt_tokens, max_tokens)
            made = await self._ask(self._predictor, each)
            if made is not None:
                return made
        return self._history.forecast(question.model, max_tokens)

    def name(self, number: int) -> str:
        """The name of a request at the predictor."""
        return f"{self._prefix}{number}"

    def learn(self, outcome: Outcome) -> None:
        self._max_tokens.pop(outcome.request_id, None)
        self._history.learn(outcome)
        if self._predictor is not None:
            self._endings.put(outcome)

    def drop(self, number: int) -> None:
        """A request ended without an outcome."""
        self._drop(self.name(number))

    def _drop(self, name: str) -> None:
        if self._max_tokens.pop(name, None) is not None:
            self._endings.put(name)

    async def run(self) -> None:
        """Delivers outcomes and receives better forecasts, if there is a predictor."""
        if self._predictor is not None:
            opened = partial(self._open_improve, self._predictor)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._deliver(self._predictor))
                tasks.create_task(follow(opened, self._on_improved, "improved forecasts"))

    async def _ask(
        self,
        predictor: "predictor_pb2_grpc.PredictorAsyncStub",
        question: predictor_pb2.ForecastInput,
    ) -> Forecast | None:
        if self._breaker.wait_s(_now()) or self._breaker.phase is BreakerPhase.HALF_OPEN:
            self._metrics.fallbacks.labels(OPEN).inc()
            return None
        self._breaker = self._breaker.called()
        self._max_tokens[question.request_id] = question.max_tokens
        message = predictor_pb2.ForecastRequest(inputs=[question])
        try:
            async with asyncio.timeout(self._wait_s):
                answer = await predictor.Forecast(message)
            made = decode_forecast(answer.forecasts[0], question.max_tokens)
        except asyncio.CancelledError:  # its client has gone; a probe must not stay open
            if self._breaker.phase is BreakerPhase.HALF_OPEN:
                self._breaker = self._breaker.failed(_now())
            self._drop(question.request_id)
            raise
        except TimeoutError:
            self._failed(LATE, f"no answer within {self._wait_s:g} s")
            return None
        except aio.AioRpcError as error:
            self._failed(FAILED, describe(error))
            return None
        except (ValueError, IndexError) as error:
            self._failed(FAILED, f"no usable forecast: {error}")
            return None
        self._set_breaker(self._breaker.answered())
        return made

    def _failed(self, reason: str, why: str) -> None:
        self._metrics.fallbacks.labels(reason).inc()
        self._set_breaker(self._breaker.failed(_now()), why)

    def _set_breaker(self, breaker: Breaker, why: str = "") -> None:
        before, self._breaker = self._breaker.phase, breaker
        if breaker.phase is BreakerPhase.OPEN and before is BreakerPhase.CLOSED:
            log.warning("the predictor does not answer (%s); history forecasts until it does", why)
        elif breaker.phase is BreakerPhase.CLOSED and before is not BreakerPhase.CLOSED:
            log.warning("the predictor answers again")

    async def _deliver(self, predictor: "predictor_pb2_grpc.PredictorAsyncStub") -> None:
        while True:
            endings = await self._endings.pop(MAX_PER_CALL)
            message = encode_endings(endings, self._reporter)
            await deliver(
                partial(predictor.Observe, message, timeout=OBSERVE_S), "outcomes to the predictor"
            )
            await asyncio.sleep(OBSERVE_INTERVAL_S)

    async def _open_improve(
        self, predictor: "predictor_pb2_grpc.PredictorAsyncStub"
    ) -> ResponseStream[predictor_pb2.ImprovedForecasts]:
        return predictor.Improve(predictor_pb2.ImproveRequest())

    def _on_improved(self, message: predictor_pb2.ImprovedForecasts) -> None:
        try:
            for name, forecast in zip(message.request_ids, message.forecasts, strict=True):
                if name in self._max_tokens:
                    better = decode_forecast(forecast, self._max_tokens[name])
                    self._improved(int(name.removeprefix(self._prefix)), better)
        except ValueError as error:
            log.warning("improved forecasts are invalid and ignored: %s", error)


def _input(
    name: str, question: Question, prompt_tokens: int, max_tokens: int
) -> predictor_pb2.ForecastInput:
    return predictor_pb2.ForecastInput(
        request_id=name,
        model=question.model,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        text=common_pb2.PromptText(
            instruction=_cut(question.instruction), user_input=_cut(question.user_input)
        ),
    )


def _cut(text: str) -> str:
    """Its first bytes, whole characters only."""
    encoded = text[:MAX_TEXT_BYTES].encode(errors="replace")[:MAX_TEXT_BYTES]
    return encoded.decode(errors="ignore")


def _now() -> float:
    return asyncio.get_running_loop().time()

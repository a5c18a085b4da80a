"""The predictor's servicer: parse, forecast or put into the log, encode. It reads the clock."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry

from protos import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.forecast import MOST_TOKENS
from services.predictor.assembly import assemble
from services.predictor.blend.guard import Made
from services.predictor.config import PredictorConfig
from services.predictor.encoder.extract import TextEncoder, cut
from services.predictor.encoder.reading import Found
from services.predictor.interface import Prompt, Query
from services.predictor.learning.pending import Waiting
from services.predictor.learning.records import MOST_NAME_CHARS
from services.predictor.learning.refitting import Refitter
from services.predictor.metrics import PredictorMetrics
from services.runtime.codec import decode_outcome, encode_forecast
from services.runtime.errors import InvalidArgument
from services.runtime.outcomelog.config import LogConfig

log = logging.getLogger(__name__)

MOST_PER_CALL = 1_024  # what one Forecast or Observe message may carry
MOST_ANSWERS = 32  # of a conversation; the last
LEARN_S = 0.1  # what Observe waits for its outcomes to be learnt; usually half
TELL_S = 1.0  # between two looks at the gauges

MEMORY = LogConfig()


class PredictorService(predictor_pb2_grpc.PredictorServicer):
    """Serves the predictor its config names; raises ValueError when something of it cannot be.

    `run` must be running for prompts to be read and outcomes to be learnt.
    """

    def __init__(
        self,
        config: PredictorConfig,
        registry: CollectorRegistry,
        log: LogConfig = MEMORY,
        encoder: TextEncoder | None = None,
    ):
        self._metrics = PredictorMetrics(registry)
        self._parts = assemble(config, log, self._metrics, encoder)
        self._max_text_bytes = config.max_text_bytes
        self._keep_text = log.keep_text
        self._put = 0  # rows given to the journal
        self._failure_said = False

    async def run(self) -> None:
        """Read, learn, fit and tell, until cancelled."""
        parts = self._parts
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(parts.journal.run())
            tasks.create_task(parts.learning.run())
            tasks.create_task(self._tell_loop())
            if content := parts.content:
                tasks.create_task(content.reader.run())
                tasks.create_task(self._fit_loop(content.refitter))

    # RPCs

    async def Forecast(
        self, request: predictor_pb2.ForecastRequest, context: object
    ) -> predictor_pb2.ForecastResponse:
        _require_few("inputs", len(request.inputs))
        for i, message in enumerate(request.inputs):
            _require_sound(i, message)
        with self._metrics.forecast_seconds.time():
            made = await self._forecast(request.inputs)
        for source, count in Counter(m.given.source for m in made).items():
            self._metrics.forecasts.labels(source).inc(count)
        return predictor_pb2.ForecastResponse(forecasts=[encode_forecast(m.given) for m in made])

    async def Observe(
        self, request: predictor_pb2.ObserveOutcomesRequest, context: object
    ) -> predictor_pb2.ObserveOutcomesResponse:
        _require_few("outcomes", len(request.outcomes))
        for i, message in enumerate(request.outcomes):
            _require_named(f"outcomes[{i}]", message.model, message.application)
            if message.output_tokens > MOST_TOKENS:
                raise InvalidArgument(f"outcomes[{i}].output_tokens", f"at most {MOST_TOKENS}")
        journal, outcomes = self._parts.journal, [decode_outcome(m) for m in request.outcomes]
        if self._parts.outcomes.settle(outcomes, time.time(), journal.put):
            self._say_set_aside()
        self._put += len(outcomes)
        if not journal.unavailable:
            await self._parts.learning.has_come(self._put - journal.dropped, LEARN_S)
        return predictor_pb2.ObserveOutcomesResponse(version=self._parts.foreteller.version)

    # Forecasts

    async def _forecast(self, inputs: Sequence[predictor_pb2.ForecastInput]) -> list[Made]:
        prompts = [self._prompt(message) for message in inputs]
        found: Sequence[Found | None] = [None] * len(prompts)
        if content := self._parts.content:
            found = await content.reader.read(prompts)
        batch = [_query(*each) for each in zip(inputs, found, prompts, strict=True)]
        made = self._foretell(batch)
        for message, prompt, each, forecast in zip(inputs, prompts, found, made, strict=True):
            packed = each[1] if each else b""
            kept = prompt if self._keep_text else None
            self._parts.outcomes.pending.put(message.request_id, Waiting(forecast, packed, kept))
        return made

    def _foretell(self, batch: Sequence[Query]) -> list[Made]:
        """By history where the model fails, whatever of: serving goes on."""
        try:
            return self._parts.foreteller.forecast(batch)
        except Exception:
            if not self._failure_said:
                self._failure_said = True
                log.exception("the model failed, history stands in; this is said once")
            self._metrics.fallbacks.labels("model").inc(len(batch))
            return self._parts.foreteller.forecast([replace(q, features=None) for q in batch])

    def _prompt(self, message: predictor_pb2.ForecastInput) -> Prompt | None:
        """What there is to read, cut like the gateway cuts; None where no text was sent."""
        if not message.HasField("text"):
            return None
        text: common_pb2.PromptText = message.text
        return Prompt(
            cut(text.instruction, self._max_text_bytes),
            cut(text.user_input, self._max_text_bytes),
            message.prompt_tokens,
            tuple(min(tokens, MOST_TOKENS) for tokens in text.answer_tokens[-MOST_ANSWERS:]),
        )

    # Learning and telling

    async def _fit_loop(self, refitter: Refitter) -> None:
        """Begins when all that the log held is learnt, so that the first fit is to all of it."""
        learning = self._parts.learning
        await self._parts.journal.replayed.wait()
        await learning.has_studied()
        await refitter.run(lambda: learning.examples)

    def _say_set_aside(self) -> None:
        aside = self._parts.foreteller.set_aside
        self._metrics.set_aside.set(aside)
        log.warning(
            "the model does worse than history and is set aside; it goes on learning"
            if aside
            else "the model does better than history again and is taken back"
        )

    async def _tell_loop(self) -> None:
        judged = -1
        while True:
            outcomes = self._parts.outcomes
            if outcomes.judged != judged:
                judged = outcomes.judged
                self._metrics.scored(outcomes.scorecard.scores())
            self._tell()
            await asyncio.sleep(TELL_S)

    def _tell(self) -> None:
        parts, pending = self._parts, self._parts.outcomes.pending
        self._metrics.tell(pending=len(pending), pending_dropped=pending.dropped)
        self._metrics.tell(examples=parts.learning.examples)
        self._metrics.logged(parts.journal, parts.learning)
        if parts.content and (refitter := parts.content.refitter).version:
            age_s = time.monotonic() - refitter.adopted_at_s
            self._metrics.tell(model_version=refitter.version, model_age_seconds=age_s)


def _query(
    message: predictor_pb2.ForecastInput, found: Found | None, prompt: Prompt | None
) -> Query:
    return Query(
        message.model,
        message.application,
        message.prompt_tokens,
        message.max_tokens,
        found[0] if found else None,
        prompt,
    )


def _require_sound(i: int, message: predictor_pb2.ForecastInput) -> None:
    _require_named(f"inputs[{i}]", message.model, message.application)
    if not 1 <= message.max_tokens <= MOST_TOKENS:
        raise InvalidArgument(
            f"inputs[{i}].max_tokens", f"must be 1 to {MOST_TOKENS}, got {message.max_tokens}"
        )


def _require_few(field: str, count: int) -> None:
    if count > MOST_PER_CALL:
        raise InvalidArgument(field, f"at most {MOST_PER_CALL} a call, got {count}")


def _require_named(where: str, model: str, application: str) -> None:
    if max(len(model), len(application)) > MOST_NAME_CHARS:
        raise InvalidArgument(where, f"a name has at most {MOST_NAME_CHARS} characters")

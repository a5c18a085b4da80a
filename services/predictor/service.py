"""The predictor's servicer: parse, answer or put into the log, encode. It reads the clock."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from prometheus_client import CollectorRegistry

from observability.logs import concerning
from observability.metrics import predictor as catalogue
from observability.metrics.metric import Metric
from observability.metrics.reading import Look
from observability.tracing import NO_SPANS, Spans
from protos.generated import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.forecast import MAX_FORECAST_TOKENS
from services.predictor.assembly import assemble
from services.predictor.config import PredictorConfig
from services.predictor.encoder.extract import TextEncoder, cut
from services.predictor.interface import Prompt, Query
from services.predictor.learning.records import MOST_NAME_CHARS
from services.predictor.learning.refitter import Refitter
from services.predictor.metrics import PredictorMetrics
from services.predictor.serving.broadcast import Feed
from services.predictor.serving.forecaster import Answer, Asked, Read
from services.predictor.spans import PredictorSpans
from services.runtime.codecs.common import decode_outcome, encode_forecast
from services.runtime.errors import InvalidArgument
from services.runtime.outcomelog import Row
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
        spans: Spans = NO_SPANS,
    ):
        self._spans = PredictorSpans(spans)
        self._metrics = PredictorMetrics(registry)
        self._improved: Feed[predictor_pb2.ImprovedForecasts] = Feed(config.improved_max)
        self._parts = assemble(config, log, self._metrics, self._have_read, encoder)
        self._metrics.read_from(self._kept())
        self._max_text_bytes = config.max_text_bytes
        self._put = 0  # rows given to the journal
        self._failure_said = False

    async def run(self) -> None:
        """Read, learn, fit and tell, until cancelled."""
        parts = self._parts
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(parts.journal.run())
                tasks.create_task(self._tell_loop())
                if content := parts.content:
                    tasks.create_task(parts.learning.run())
                    tasks.create_task(content.reader.run())
                    tasks.create_task(self._fit_loop(content.refitter))
        finally:
            if content := parts.content:
                content.desk.close()

    @property
    def listeners(self) -> int:
        """Streams that better forecasts are told to."""
        return len(self._improved)

    # RPCs

    async def Forecast(
        self, request: predictor_pb2.ForecastRequest, context: object
    ) -> predictor_pb2.ForecastResponse:
        _require_few("inputs", len(request.inputs))
        for i, message in enumerate(request.inputs):
            _require_sound(i, message)
        since_s = time.monotonic()
        with self._metrics.forecast_seconds.time(), concerning(*_whose(request.inputs)):
            answers = self._answer([self._asked(message) for message in request.inputs])
        self._spans.answered(request.inputs, answers, since_s, time.monotonic())
        given = [answer.made.given for answer in answers]
        for source, count in Counter(forecast.source for forecast in given).items():
            self._metrics.forecasts.labels(source).inc(count)
        for stage, count in Counter(answer.stage for answer in answers).items():
            self._metrics.answered.labels(stage).inc(count)
        return predictor_pb2.ForecastResponse(forecasts=[encode_forecast(f) for f in given])

    async def Improve(
        self, request: predictor_pb2.ImproveRequest, context: object
    ) -> AsyncIterator[predictor_pb2.ImprovedForecasts]:
        async with aclosing(self._improved.listen()) as messages:
            async for message in messages:
                yield message

    async def Observe(
        self, request: predictor_pb2.ObserveOutcomesRequest, context: object
    ) -> predictor_pb2.ObserveOutcomesResponse:
        _require_few("outcomes", len(request.outcomes))
        for i, message in enumerate(request.outcomes):
            _require_named(f"outcomes[{i}]", message.model, message.application)
            if message.output_tokens > MAX_FORECAST_TOKENS:
                raise InvalidArgument(
                    f"outcomes[{i}].output_tokens", f"at most {MAX_FORECAST_TOKENS}"
                )
        journal, outcomes = self._parts.journal, [decode_outcome(m) for m in request.outcomes]
        if self._parts.outcomes.settle(outcomes, time.time(), self._put_row):
            self._say_set_aside()
        if not journal.unavailable:
            await self._parts.learning.has_come(self._put - journal.dropped, LEARN_S)
        return predictor_pb2.ObserveOutcomesResponse(version=self._parts.foreteller.version)

    # Forecasts

    def _answer(self, batch: Sequence[Asked]) -> list[Answer]:
        """By history where the model fails, whatever of: serving goes on."""
        cascade, content = self._parts.cascade, self._parts.content
        try:
            answers = cascade.answer(batch)
        except Exception:
            if not self._failure_said:
                self._failure_said = True
                log.exception("the model failed, history stands in; this is said once")
            self._metrics.fallbacks.labels("model").inc(len(batch))
            unread = [replace(a, query=replace(a.query, prompt=None)) for a in batch]
            answers = cascade.answer(unread)
        if content and cascade.unread:
            content.reader.wake()
        return answers

    def _have_read(self, read: Read) -> None:
        self._metrics.read.labels("waiting").inc(read.waiting)
        self._metrics.read.labels("ended").inc(read.ended)
        for reason, count in Counter(read.missed).items():
            self._metrics.fallbacks.labels(reason).inc(count)
        for late, packed in read.late:
            self._put_row(self._parts.outcomes.late(late, packed))
        if read.better:
            self._improved.push(_improved(read))
            self._metrics.improved.inc(len(read.better))
            now_s = time.monotonic()
            self._spans.read(read, now_s)
            for since_s in read.since_s:
                self._metrics.reading_lag.observe(now_s - since_s)

    def _put_row(self, row: Row) -> None:
        self._parts.journal.put(row)
        self._put += 1

    def _asked(self, message: predictor_pb2.ForecastInput) -> Asked:
        query = Query(
            message.model,
            message.application,
            message.prompt_tokens,
            message.max_tokens,
            prompt=self._prompt(message),
        )
        return Asked(message.request_id, query, time.monotonic())

    def _prompt(self, message: predictor_pb2.ForecastInput) -> Prompt | None:
        """What there is to read, cut like the gateway cuts; None where no text was sent."""
        if not message.HasField("text"):
            return None
        text: common_pb2.PromptText = message.text
        return Prompt(
            cut(text.instruction, self._max_text_bytes),
            cut(text.user_input, self._max_text_bytes),
            message.prompt_tokens,
            tuple(
                min(tokens, MAX_FORECAST_TOKENS) for tokens in text.answer_tokens[-MOST_ANSWERS:]
            ),
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
        judged, spent_s, at_s = -1, 0.0, time.monotonic()
        while True:
            if content := self._parts.content:
                now_s, all_s = time.monotonic(), content.desk.budget.spent_s
                self._metrics.tell(cpu_share=(all_s - spent_s) / max(now_s - at_s, 1e-9))
                spent_s, at_s = all_s, now_s
            outcomes = self._parts.outcomes
            if outcomes.judged != judged:
                judged = outcomes.judged
                self._metrics.scored(outcomes.scorecard.scores())
            self._tell()
            await asyncio.sleep(TELL_S)

    def _tell(self) -> None:
        parts, cascade = self._parts, self._parts.cascade
        self._metrics.tell(pending=len(parts.outcomes.pending), examples=parts.learning.examples)
        self._metrics.tell(unread=len(cascade.unread), unread_ended=len(cascade.ended))
        self._metrics.tell(listeners=self.listeners)
        self._metrics.logged(parts.journal)
        if parts.content:
            self._metrics.tell(model_version=parts.content.refitter.version)

    def _kept(self) -> Mapping[Metric, Look]:
        """What is counted where it happens."""
        parts = self._parts
        cascade, learning, journal = parts.cascade, parts.learning, parts.journal
        return {
            catalogue.UNREAD_DROPPED: lambda: cascade.unread.dropped + cascade.ended.dropped,
            catalogue.IMPROVED_DROPPED: lambda: self._improved.dropped,
            catalogue.PENDING_DROPPED: lambda: parts.outcomes.pending.dropped,
            catalogue.LOG_WRITTEN: lambda: journal.written,
            catalogue.LOG_DROPPED: lambda: journal.dropped,
            catalogue.LOG_DELIVERED: lambda: journal.delivered,
            catalogue.LOG_UNREADABLE: lambda: (
                learning.unreadable + learning.unstudied + journal.undeliverable
            ),
            catalogue.LOG_FROM_FUTURE: lambda: journal.from_future,
            catalogue.MODEL_AGE: self._model_age_s,
        }

    def _model_age_s(self) -> float | None:
        """None before the first fit is adopted, and where none ever is."""
        content = self._parts.content
        if content is None or not content.refitter.version:
            return None
        return time.monotonic() - content.refitter.adopted_at_s


def _improved(read: Read) -> predictor_pb2.ImprovedForecasts:
    return predictor_pb2.ImprovedForecasts(
        request_ids=[name for name, _ in read.better],
        forecasts=[encode_forecast(forecast) for _, forecast in read.better],
    )


def _whose(inputs: Sequence[predictor_pb2.ForecastInput]) -> tuple[str, str]:
    """The request that a call is about, and what it is traced under; of many, nobody's."""
    return (inputs[0].request_id, inputs[0].traceparent) if len(inputs) == 1 else ("", "")


def _require_sound(i: int, message: predictor_pb2.ForecastInput) -> None:
    _require_named(f"inputs[{i}]", message.model, message.application)
    if not 1 <= message.max_tokens <= MAX_FORECAST_TOKENS:
        raise InvalidArgument(
            f"inputs[{i}].max_tokens",
            f"must be 1 to {MAX_FORECAST_TOKENS}, got {message.max_tokens}",
        )


def _require_few(field: str, count: int) -> None:
    if count > MOST_PER_CALL:
        raise InvalidArgument(field, f"at most {MOST_PER_CALL} a call, got {count}")


def _require_named(where: str, model: str, application: str) -> None:
    if max(len(model), len(application)) > MOST_NAME_CHARS:
        raise InvalidArgument(where, f"a name has at most {MOST_NAME_CHARS} characters")

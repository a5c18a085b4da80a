"""Serves the predictor: parses requests, calls the predictor and encodes responses."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from observability.logs import log_context
from observability.metrics import predictor as catalogue
from observability.metrics.instruments import ReadValue
from observability.metrics.metric import Metric
from observability.tracing import NO_SPANS, Spans
from protos.generated import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.core import Outcome
from services.forecast import MAX_FORECAST_TOKENS
from services.predictor.assembly import assemble
from services.predictor.blend.guard import Decision
from services.predictor.border import check_forecast, check_observed
from services.predictor.config import PredictorConfig
from services.predictor.encoder.extract import TextEncoder, cut
from services.predictor.interface import Prompt, Query
from services.predictor.learning.log_warning import find_warning
from services.predictor.learning.plausible import find_implausible
from services.predictor.learning.records import MAX_NAME_CHARS
from services.predictor.learning.refitter import Refitter
from services.predictor.metrics import PredictorMetrics
from services.predictor.serving.broadcast import Broadcast
from services.predictor.serving.forecaster import (
    ForecastQuery,
    ImmediateForecast,
    PromptReading,
    ReadingResult,
)
from services.predictor.spans import PredictorSpans
from services.runtime.codecs.common import (
    decode_live_answers,
    decode_outcome,
    encode_forecast,
)
from services.runtime.errors import Code, ServiceError
from services.runtime.network.identity import peer_name
from services.runtime.outcomelog import Row
from services.runtime.outcomelog.config import LogConfig

log = logging.getLogger(__name__)

MAX_ANSWERS = 32  # latest answers of a conversation that are used
OBSERVE_WAIT_S = 0.1  # Observe waits at most this long for its outcomes to be learned
METRICS_INTERVAL_S = 1.0  # between two updates of scores and CPU share

IN_MEMORY = LogConfig()
UNREAD = PromptReading()


class PredictorService(predictor_pb2_grpc.PredictorServicer):
    """Serves the predictor that the config names; raises ValueError when it cannot be built.

    Prompts are read and outcomes learned only while `run` is running.
    """

    def __init__(
        self,
        config: PredictorConfig,
        registry: CollectorRegistry,
        log: LogConfig = IN_MEMORY,
        encoder: TextEncoder | None = None,
        spans: Spans = NO_SPANS,
    ):
        self._spans = PredictorSpans(spans)
        self.metrics = PredictorMetrics(registry)
        self._improvements: Broadcast[predictor_pb2.ImprovedForecasts] = Broadcast(
            config.improved_max
        )
        self._parts = assemble(config, log, self.metrics, self._on_read, encoder)
        self.metrics.register_readings(self._readings())
        self._max_text_bytes, self._listeners_max = config.max_text_bytes, config.listeners_max
        self._warning = ""  # what does not work at the outcome log
        self._answer = self._answer_read if config.pure else self._answer_at_once
        self._rows_put = 0  # rows written to the journal
        self._failure_logged = False

    async def run(self) -> None:
        """Reads prompts, learns, refits and updates metrics until cancelled."""
        parts = self._parts
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(parts.journal.run())
                tasks.create_task(self._metrics_loop())
                if content := parts.content:
                    tasks.create_task(parts.learning.run())
                    tasks.create_task(content.reader.run())
                    tasks.create_task(self._fit_loop(content.refitter))
        finally:
            if content := parts.content:
                content.executor.close()

    @property
    def listeners(self) -> int:
        """Number of streams that receive improved forecasts."""
        return len(self._improvements)

    # RPCs

    async def Forecast(
        self, request: predictor_pb2.ForecastRequest, context: object
    ) -> predictor_pb2.ForecastResponse:
        check_forecast(request)
        began_s = time.monotonic()
        with self.metrics.forecast_seconds.time(), log_context(*_log_context(request.inputs)):
            queries = [self._decode_query(message) for message in request.inputs]
            answers = await self._answer(queries)
        self._spans.record_forecasts(request.inputs, answers, began_s, time.monotonic())
        given = [answer.pair.given for answer in answers]
        for source, count in Counter(forecast.source for forecast in given).items():
            self.metrics.forecasts.labels(source).inc(count)
        for stage, count in Counter(answer.stage for answer in answers).items():
            self.metrics.answered.labels(stage).inc(count)
        return predictor_pb2.ForecastResponse(forecasts=map(encode_forecast, given))

    async def Improve(
        self, request: predictor_pb2.ImproveRequest, context: object
    ) -> AsyncIterator[predictor_pb2.ImprovedForecasts]:
        if self.listeners >= self._listeners_max:
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED,
                f"{self._listeners_max} streams of improved forecasts are open; close one or raise "
                "predictor.listeners_max",
            )
        warning = predictor_pb2.ImprovedForecasts(warning=self._warning)
        first = [warning] if self._warning else []
        async with aclosing(self._improvements.listen(first)) as messages:
            async for message in messages:
                yield message

    async def Observe(
        self, request: predictor_pb2.ObserveOutcomesRequest, context: Any
    ) -> predictor_pb2.ObserveOutcomesResponse:
        check_observed(request)
        reporter = (peer_name(context) or request.reporter)[:MAX_NAME_CHARS]
        journal, outcomes = self._parts.journal, self._plausible(request.outcomes, reporter)
        changes = self._parts.outcomes.settle(outcomes, time.time(), self._put_row)
        # After each call: an evicted application no longer counts.
        self.metrics.set_aside.set(self._parts.forecaster.set_aside)
        self._log_decisions(changes)
        for request_id in request.ended_ids:
            self._parts.two_stage.drop(request_id)
        if not journal.unavailable:
            await self._parts.learning.wait_for_own_rows(
                self._rows_put - journal.dropped, OBSERVE_WAIT_S
            )
        self._parts.forecaster.observe_live([decode_live_answers(m) for m in request.live])
        return predictor_pb2.ObserveOutcomesResponse(version=self._parts.forecaster.version)

    def _plausible(self, messages: Sequence[predictor_pb2.Outcome], reporter: str) -> list[Outcome]:
        """The outcomes that can be true; the others are counted and left out."""
        outcomes = [decode_outcome(message, reporter) for message in messages]
        fields = list(map(find_implausible, outcomes))
        for field, count in Counter(filter(None, fields)).items():
            self.metrics.implausible.labels(field).inc(count)
            log.warning("%d outcomes are left out, for an impossible %s", count, field)
        return [outcome for outcome, field in zip(outcomes, fields, strict=True) if not field]

    # Forecasts

    async def _answer_read(self, batch: Sequence[ForecastQuery]) -> list[ImmediateForecast]:
        """Answers a batch when its prompts were read; a plain forecast for those without text."""
        content, readings = self._parts.content, dict[str, PromptReading]()
        given = [query for query in batch if query.query.prompt]
        if content and given:
            read = await content.executor.run(partial(content.read, given))
            readings = {q.request_id: r for q, r in zip(given, read, strict=True)}
            failed = Counter(reading.failed_step for reading in read if reading.failed_step)
            for step, count in failed.items():
                self.metrics.fallbacks.labels(step).inc(count)
        return self._parts.two_stage.answer_read(
            batch, [readings.get(query.request_id, UNREAD) for query in batch]
        )

    async def _answer_at_once(self, batch: Sequence[ForecastQuery]) -> list[ImmediateForecast]:
        """Answers a batch; from history when the prompt model fails."""
        two_stage, content = self._parts.two_stage, self._parts.content
        try:
            answers = two_stage.answer(batch)
        except Exception:
            if not self._failure_logged:
                self._failure_logged = True
                log.exception("the prompt model failed; forecasts come from history (logged once)")
            self.metrics.fallbacks.labels("model").inc(len(batch))
            without_prompts = [replace(a, query=replace(a.query, prompt=None)) for a in batch]
            answers = two_stage.answer(without_prompts)
        if content and two_stage.unread:
            content.reader.wake()
        return answers

    def _on_read(self, read: ReadingResult) -> None:
        self.metrics.read.labels("waiting").inc(read.waiting)
        self.metrics.read.labels("ended").inc(read.ended)
        for step, count in Counter(read.failed_steps).items():
            self.metrics.fallbacks.labels(step).inc(count)
        for ended, packed in read.ended_features:
            self._put_row(self._parts.outcomes.late_row(ended, packed))
        if read.improved:
            names, forecasts = zip(*read.improved, strict=True)
            message = predictor_pb2.ImprovedForecasts(
                request_ids=names, forecasts=map(encode_forecast, forecasts)
            )
            self._improvements.push(message)
            self.metrics.improved.inc(len(names))
            now_s = time.monotonic()
            self._spans.record_reading(read, now_s)
            for requested_at_s in read.requested_at_s:
                self.metrics.reading_lag.observe(now_s - requested_at_s)

    def _put_row(self, row: Row) -> None:
        self._parts.journal.put(row)
        self._rows_put += 1

    def _decode_query(self, message: predictor_pb2.ForecastInput) -> ForecastQuery:
        query = Query(
            message.model,
            message.application,
            message.prompt_tokens,
            message.max_tokens,
            prompt=self._prompt(message),
        )
        return ForecastQuery(message.request_id, query, time.monotonic())

    def _prompt(self, message: predictor_pb2.ForecastInput) -> Prompt | None:
        """Returns the prompt, truncated as in the gateway; None when the message has no text."""
        if not message.HasField("text"):
            return None
        text: common_pb2.PromptText = message.text
        return Prompt(
            cut(text.instruction, self._max_text_bytes),
            cut(text.user_input, self._max_text_bytes),
            message.prompt_tokens,
            tuple(min(tokens, MAX_FORECAST_TOKENS) for tokens in text.answer_tokens[-MAX_ANSWERS:]),
        )

    # Learning and metrics

    async def _fit_loop(self, refitter: Refitter) -> None:
        """Refits from the time when the whole log has been learned."""
        learning = self._parts.learning
        await self._parts.journal.replayed.wait()
        await learning.wait_until_studied()
        await refitter.run(lambda: learning.examples)

    def _log_decisions(self, changes: Sequence[Decision]) -> None:
        for change in changes:
            log.warning(
                "the prompt model is less accurate than history for %s and is set aside there; it "
                "continues to learn"
                if change.set_aside
                else "the prompt model is more accurate than history again for %s and is used",
                change.subject,
            )

    async def _metrics_loop(self) -> None:
        judged, spent_s, at_s = -1, 0.0, time.monotonic()
        while True:
            if content := self._parts.content:
                now_s, total_s = time.monotonic(), content.executor.budget.spent_s
                self.metrics.cpu_share.set((total_s - spent_s) / max(now_s - at_s, 1e-9))
                spent_s, at_s = total_s, now_s
            outcomes = self._parts.outcomes
            if outcomes.judged != judged:
                judged = outcomes.judged
                self.metrics.set_scores(outcomes.scorecard.scores())
            self._send_warning(find_warning(self._parts.journal, self._parts.learning))
            await asyncio.sleep(METRICS_INTERVAL_S)

    def _send_warning(self, warning: str) -> None:
        """Sends the warning to the listeners if it has changed."""
        if warning != self._warning:
            self._warning = warning
            self._improvements.push(predictor_pb2.ImprovedForecasts(warning=warning))

    def _readings(self) -> Mapping[Metric, ReadValue]:
        """Numbers of the parts, read at each scrape."""
        parts, content = self._parts, self._parts.content
        two_stage, learning, journal = parts.two_stage, parts.learning, parts.journal
        return {
            catalogue.LISTENERS: lambda: self.listeners,
            catalogue.UNREAD: lambda: len(two_stage.unread),
            catalogue.UNREAD_ENDED: lambda: len(two_stage.ended),
            catalogue.PENDING: lambda: len(parts.outcomes.pending),
            catalogue.EXAMPLES: lambda: learning.examples,
            catalogue.MODEL_VERSION: lambda: content.refitter.version if content else 0,
            catalogue.LOG_PENDING: lambda: journal.pending,
            catalogue.LOG_UNAVAILABLE: lambda: journal.unavailable,
            catalogue.UNREAD_DROPPED: lambda: two_stage.unread.dropped + two_stage.ended.dropped,
            catalogue.IMPROVED_DROPPED: lambda: self._improvements.dropped,
            catalogue.PENDING_DROPPED: lambda: parts.outcomes.pending.dropped,
            catalogue.LOG_WRITTEN: lambda: journal.written,
            catalogue.LOG_DROPPED: lambda: journal.dropped,
            catalogue.LOG_DELIVERED: lambda: journal.delivered,
            catalogue.LOG_UNREADABLE: lambda: (
                learning.unreadable + learning.failed_to_study + journal.undeliverable
            ),
            catalogue.LOG_FROM_FUTURE: lambda: journal.from_future,
            catalogue.MODEL_AGE: self._model_age_s,
        }

    def _model_age_s(self) -> float | None:
        """None before the first fit and for predictors without fits."""
        content = self._parts.content
        if content is None or not content.refitter.version:
            return None
        return time.monotonic() - content.refitter.adopted_at_s


def _log_context(inputs: Sequence[predictor_pb2.ForecastInput]) -> tuple[str, str]:
    """Request id and traceparent of a call with one input; empty for a batch."""
    return (inputs[0].request_id, inputs[0].traceparent) if len(inputs) == 1 else ("", "")

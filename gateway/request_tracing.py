"""The span of a client's request, from its arrival to its last sent token, and gen_ai metrics.

A trace reads the clock itself and costs nothing while tracing is off.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf

from gateway.admission.caller import current_caller
from gateway.sessions.call import ClientCall
from gateway.types.generation import GenerationRequest
from gateway.types.outcome import ChoiceOutcome
from observability import genai
from observability.logs import add_log_context
from observability.tracing import Attributes, Span, Spans, Value
from services.core import FinishReason
from services.runtime.errors import ServiceError
from services.runtime.telemetry.tracing import TRACEPARENT, TRACESTATE

CANCELLED = "cancelled"


class RequestTrace:
    """The trace of one request. This base class, used while tracing is off, records nothing.

    It describes what the client received, as metrics and verdicts do.
    """

    traceparent = ""  # parent of the spans of other services

    @contextmanager
    def ends_on_error(self) -> Iterator[None]:
        """An exception of the block ends the trace."""
        yield

    def on_model(self, name: str) -> None:
        """The request selects a model. Before, the trace is that of the first one."""

    def on_tokenized(self, since_s: float, prompt_tokens: int) -> None:
        """A prompt was parsed, beginning at `since_s`."""

    def on_opened(self, call: ClientCall, requests: Sequence[GenerationRequest]) -> None:
        """The request is valid and submitted."""

    def on_chunk_sent(self) -> None:
        """The client's connection has accepted a chunk."""

    def end(self, error: BaseException | None = None) -> None:
        """The answer is complete or never will be, and its call is closed. Only the first call
        counts."""


NO_TRACE = RequestTrace()


class RequestTracer:
    """Begins the traces of one process. `model`: of requests until their model is known."""

    def __init__(self, spans: Spans, model: str):
        self._spans, self._model = spans, model

    def begin(
        self, operation: str, carrier: Mapping[str, str], attributes: Attributes
    ) -> RequestTrace:
        """`operation` is the gen_ai convention's name. `carrier`: the request's headers by lower
        case name, of which only the two of W3C Trace Context are read."""
        if not self._spans.on:
            return NO_TRACE
        context = {
            name: value for name in (TRACEPARENT, TRACESTATE) if (value := carrier.get(name))
        }
        now_s = time.monotonic()
        common = {
            genai.OPERATION_NAME: operation,
            genai.PROVIDER_NAME: genai.PROVIDER,
            genai.REQUEST_MODEL: self._model,
        }
        all_attributes = {**common, **attributes, **current_caller().attributes}
        span = self._spans.begin_request(_span_name(common), context, now_s, all_attributes)
        add_log_context(trace_id=span.trace_id)
        return RecordedTrace(self._spans, span, common, now_s)


class RecordedTrace(RequestTrace):
    """A request that is recorded, or at least measured: metrics also count unsampled requests."""

    def __init__(self, spans: Spans, span: Span, common: Attributes, arrival_s: float):
        self.traceparent = span.traceparent
        self._spans, self._span, self._common = spans, span, common
        self._arrival_s = arrival_s
        self._first_s = self._last_s = inf  # first and last sent chunk
        self._chunks = 0
        self._call: ClientCall | None = None
        self._over = False

    @contextmanager
    def ends_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise

    def on_model(self, name: str) -> None:
        if name == self._common[genai.REQUEST_MODEL]:
            return
        self._common = {**self._common, genai.REQUEST_MODEL: name}
        self._span.put(self._common)
        self._span.rename(_span_name(self._common))

    def on_tokenized(self, since_s: float, prompt_tokens: int) -> None:
        # Not the conventional usage attribute, which belongs to the request's span alone.
        attributes = {"foretoken.prompt_tokens": prompt_tokens}
        now_s = time.monotonic()
        self._spans.record("tokenize", self.traceparent, since_s, now_s, attributes)

    def on_opened(self, call: ClientCall, requests: Sequence[GenerationRequest]) -> None:
        self._call = call
        sampling = requests[0].sampling
        self._span.put(
            {
                genai.RESPONSE_ID: call.answer_id,
                genai.INPUT_TOKENS: call.prompt_tokens,
                genai.REQUEST_MAX_TOKENS: sampling.max_tokens,
                genai.REQUEST_CHOICE_COUNT: len(call.choices),
                genai.REQUEST_TEMPERATURE: sampling.temperature,
                genai.REQUEST_TOP_P: sampling.top_p,
                genai.REQUEST_TOP_K: sampling.top_k,
                genai.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
                genai.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
                genai.REQUEST_SEED: sampling.seed,
                "foretoken.sla.class": requests[0].sla.name,
            }
        )

    def on_chunk_sent(self) -> None:
        self._last_s = now_s = time.monotonic()
        self._first_s = min(self._first_s, now_s)
        self._chunks += 1

    def end(self, error: BaseException | None = None) -> None:
        if self._over:
            return
        self._over = True
        now_s = time.monotonic()
        choices = self._call.choices if self._call else []
        outcomes = [live.outcome for live in choices if live.outcome]
        failures = (live.session.failure for live in choices if live.session.failure)
        error = error or next(failures, None)
        kind = _error_type(error, outcomes)
        failed = {genai.ERROR_TYPE: kind} if kind else {}
        if self._chunks:
            attributes = {"foretoken.stream.chunks": self._chunks}
            self._spans.record("stream", self.traceparent, self._first_s, self._last_s, attributes)
        if outcomes:
            self._span.put(_outcome_attributes(outcomes, self._common))
        self._span.put(failed)
        if error and kind != CANCELLED:
            self._span.fail(str(error) or kind)
        self._span.end(now_s)
        self._measure(now_s, outcomes, failed)

    def _measure(self, now_s: float, outcomes: Sequence[ChoiceOutcome], failed: Attributes) -> None:
        common = {**self._common, genai.RESPONSE_MODEL: self._common[genai.REQUEST_MODEL]}
        self._spans.measure(genai.REQUEST_DURATION, now_s - self._arrival_s, {**common, **failed})
        if failed:
            return
        for outcome in outcomes:
            timeline = outcome.timeline
            if timeline.tokens:
                self._spans.measure(genai.TIME_TO_FIRST_TOKEN, timeline.ttft_s, common)
            if timeline.tokens > 1:
                self._spans.measure(genai.TIME_PER_OUTPUT_TOKEN, timeline.tpot_s, common)


def _span_name(common: Attributes) -> str:
    """The name that the gen_ai convention gives the span of a request."""
    return f"{common[genai.OPERATION_NAME]} {common[genai.REQUEST_MODEL]}"


def _outcome_attributes(outcomes: Sequence[ChoiceOutcome], common: Attributes) -> dict[str, Value]:
    """What the client received, and whether the first choice met its SLA."""
    cause = outcomes[0].cause
    return {
        genai.RESPONSE_MODEL: common[genai.REQUEST_MODEL],
        genai.OUTPUT_TOKENS: sum(outcome.timeline.tokens for outcome in outcomes),
        genai.RESPONSE_FINISH_REASONS: [outcome.reason.value for outcome in outcomes],
        "foretoken.sla.outcome": "missed" if cause else "met",
        "foretoken.sla.cause": cause.value,
    }


def _error_type(error: BaseException | None, outcomes: Sequence[ChoiceOutcome]) -> str:
    """Empty without an error, else a status' name, `cancelled`, or an exception's name."""
    if isinstance(error, ServiceError):
        return str(error.code.name)
    if error is not None and not isinstance(error, asyncio.CancelledError | GeneratorExit):
        return type(error).__name__
    cancelled = any(outcome.reason is FinishReason.CANCELLED for outcome in outcomes)
    return CANCELLED if error or cancelled else ""

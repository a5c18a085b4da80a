"""A client's request as a span, from its arrival to its last token sent, and as gen_ai metrics.

What an endpoint tells here reads the clock by itself, and costs nothing while tracing is off.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf

from gateway.admission.caller import caller
from gateway.requests.parser import Generation
from gateway.sessions.call import ClientCall
from gateway.sessions.delivery import Ended
from observability import genai
from observability.logs import about
from observability.tracing import Attributes, Measure, Span, Spans, Value
from services.core import FinishReason
from services.runtime.errors import ServiceError
from services.runtime.observed.tracing import TRACEPARENT, TRACESTATE

CANCELLED = "cancelled"


class Trace:
    """What is told of one request. This one, where tracing is off, keeps nothing.

    Of an answer it tells what its client has, as metrics and verdicts do.
    """

    traceparent = ""  # what others do for it is traced under

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What the block raises ends the request."""
        yield

    def tokenized(self, since_s: float, prompt_tokens: int) -> None:
        """Its prompt, or one of them, was parsed since then."""

    def opened(self, call: ClientCall, generations: Sequence[Generation]) -> None:
        """It was good, and is being answered."""

    def delivered(self) -> None:
        """Its client's connection has taken a chunk."""

    def end(self, error: BaseException | None = None) -> None:
        """The answer is out, or will never be, and its call is closed; once, what comes later
        changes nothing."""


NO_TRACE = Trace()


class Traces:
    """Begins those of one gateway."""

    def __init__(self, spans: Spans, model: str):
        self._spans, self._model = spans, model

    @property
    def on(self) -> bool:
        """Whether anything is kept of what they are told."""
        return self._spans.on

    def begin(self, operation: str, carrier: Mapping[str, str], attributes: Attributes) -> Trace:
        """`operation` as gen_ai's conventions call it; `carrier`: a request's headers, by names in
        lower case, of which these two are read."""
        if not self._spans.on:
            return NO_TRACE
        known = {name: each for name in (TRACEPARENT, TRACESTATE) if (each := carrier.get(name))}
        now_s = time.monotonic()
        common = {
            genai.OPERATION_NAME: operation,
            genai.PROVIDER_NAME: genai.PROVIDER,
            genai.REQUEST_MODEL: self._model,
        }
        name = f"{operation} {self._model}"
        told = {**common, **attributes, **caller().attributes}
        span = self._spans.take_in(name, known, now_s, told)
        about(trace_id=span.trace_id)
        return RequestTrace(self._spans, span, common, now_s)


class RequestTrace(Trace):
    """Of a request that is recorded, or at least measured: metrics count those not sampled too."""

    def __init__(self, spans: Spans, span: Span, common: Attributes, arrival_s: float):
        self.traceparent = span.traceparent
        self._spans, self._span, self._common = spans, span, common
        self._arrival_s = arrival_s
        self._first_s = self._last_s = inf  # chunks delivered
        self._chunks = 0
        self._call: ClientCall | None = None
        self._over = False

    @contextmanager
    def failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise

    def tokenized(self, since_s: float, prompt_tokens: int) -> None:
        told = {"foretoken.prompt_tokens": prompt_tokens}  # the usage is said once, by the request
        self._record("tokenize", since_s, time.monotonic(), told)

    def opened(self, call: ClientCall, generations: Sequence[Generation]) -> None:
        self._call = call
        asked = generations[0].sampling
        self._span.put(
            {
                genai.RESPONSE_ID: call.answer_id,
                genai.INPUT_TOKENS: call.prompt_tokens,
                genai.REQUEST_MAX_TOKENS: asked.max_tokens,
                genai.REQUEST_CHOICE_COUNT: len(call.lives),
                genai.REQUEST_TEMPERATURE: asked.temperature,
                genai.REQUEST_TOP_P: asked.top_p,
                genai.REQUEST_TOP_K: asked.top_k,
                genai.REQUEST_FREQUENCY_PENALTY: asked.frequency_penalty,
                genai.REQUEST_PRESENCE_PENALTY: asked.presence_penalty,
                genai.REQUEST_SEED: asked.seed,
                "foretoken.sla.class": generations[0].sla.name,
            }
        )

    def delivered(self) -> None:
        self._last_s = now_s = time.monotonic()
        self._first_s = min(self._first_s, now_s)
        self._chunks += 1

    def end(self, error: BaseException | None = None) -> None:
        if self._over:
            return
        self._over = True
        now_s = time.monotonic()
        lives = self._call.lives if self._call else []
        ended = [live.ended for live in lives if live.ended]
        error = error or next((x.session.failure for x in lives if x.session.failure), None)
        kind = _type_of(error, ended)
        failed = {genai.ERROR_TYPE: kind} if kind else {}
        if self._chunks:
            told = {"foretoken.stream.chunks": self._chunks}
            self._record("stream", self._first_s, self._last_s, told)
        if ended:
            self._span.put(_outcome(ended, self._common))
        self._span.put(failed)
        if error and kind != CANCELLED:
            self._span.fail(str(error) or kind)
        self._span.end(now_s)
        self._measure(now_s, ended, failed)

    def _measure(self, now_s: float, ended: Sequence[Ended], failed: Attributes) -> None:
        told = {**self._common, genai.RESPONSE_MODEL: self._common[genai.REQUEST_MODEL]}
        self._count(genai.REQUEST_DURATION, now_s - self._arrival_s, {**told, **failed})
        if failed:
            return
        for each in ended:
            if each.line.tokens:
                self._count(genai.TIME_TO_FIRST_TOKEN, each.line.ttft_s, told)
            if each.line.tokens > 1:
                self._count(genai.TIME_PER_OUTPUT_TOKEN, each.line.tpot_s, told)

    def _count(self, measure: Measure, seconds: float, attributes: Attributes) -> None:
        self._spans.measure(measure, seconds, attributes)

    def _record(self, name: str, since_s: float, until_s: float, attributes: Attributes) -> None:
        self._spans.record(name, self.traceparent, since_s, until_s, attributes)


def _outcome(ended: Sequence[Ended], common: Attributes) -> dict[str, Value]:
    """What its client has of its choices, and whether the first kept its SLA."""
    cause = ended[0].cause
    return {
        genai.RESPONSE_MODEL: common[genai.REQUEST_MODEL],
        genai.OUTPUT_TOKENS: sum(each.line.tokens for each in ended),
        genai.RESPONSE_FINISH_REASONS: [each.reason.value for each in ended],
        "foretoken.sla.outcome": "missed" if cause else "met",
        "foretoken.sla.cause": cause.value,
    }


def _type_of(error: BaseException | None, ended: Sequence[Ended]) -> str:
    """Empty where nothing is wrong, else one of few values: a status' name, or what the client did,
    or the name of a bug's exception."""
    if isinstance(error, ServiceError):
        return str(error.code.name)
    if error is not None and not isinstance(error, asyncio.CancelledError | GeneratorExit):
        return type(error).__name__
    left = any(each.reason is FinishReason.CANCELLED for each in ended)
    return CANCELLED if error or left else ""

"""Interfaces of tracing: spans of requests, and their implementation while tracing is off.

A span's context is a W3C `traceparent`, a string that headers and messages carry. It is empty if
the span is not recorded, because tracing is off or the request is not sampled; spans below it are
`NO_SPAN` and cost nothing. Times are readings of the process's monotonic clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]

NO_ATTRIBUTES: Attributes = {}
REQUEST_ID = "foretoken.request.id"  # attribute: the id in scheduler and workers


class Span(Protocol):
    """An open span. Calls after `end` have no effect."""

    @property
    def traceparent(self) -> str:
        """The context of child spans; empty if the span is not recorded."""
        ...

    @property
    def trace_id(self) -> str:
        """32 hex digits, also if the span is not sampled; empty while tracing is off."""
        ...

    def put(self, attributes: Attributes) -> None: ...

    def mark(self, name: str, at_s: float) -> None:
        """Adds an event."""
        ...

    def fail(self, reason: str) -> None: ...

    def end(self, at_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Measure:
    """A histogram of seconds, named as in OpenTelemetry's conventions."""

    name: str
    help: str
    buckets: tuple[float, ...]


class Spans(Protocol):
    """The spans of one service in one process. Thread-safe."""

    @property
    def on(self) -> bool:
        """Whether spans are recorded."""
        ...

    def begin_request(
        self, name: str, carrier: Mapping[str, str], start_s: float, attributes: Attributes
    ) -> Span:
        """The span of a client's request: under the `traceparent` and `tracestate` of the carrier
        if these are valid, else the root of a new trace. The client's sampling decision applies
        if present and trusted, else the configured share."""
        ...

    def begin(
        self, name: str, parent: str, start_s: float, attributes: Attributes = NO_ATTRIBUTES
    ) -> Span:
        """NO_SPAN for an empty or invalid parent."""
        ...

    def record(
        self,
        name: str,
        parent: str,
        start_s: float,
        end_s: float,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> None:
        """Records a span that is already over."""
        ...

    def measure(self, measure: Measure, seconds: float, attributes: Attributes) -> None:
        """Adds a measurement to a metric, independent of sampling."""
        ...


class Tracing(Protocol):
    """The tracing of one process."""

    def service(self, name: str) -> Spans: ...

    def close(self) -> None:
        """Exports queued spans and metrics, for a bounded time."""
        ...


class _NoSpan:
    traceparent = ""
    trace_id = ""

    def put(self, attributes: Attributes) -> None: ...
    def mark(self, name: str, at_s: float) -> None: ...
    def fail(self, reason: str) -> None: ...
    def end(self, at_s: float) -> None: ...


NO_SPAN: Span = _NoSpan()


class _NoSpans:
    on = False

    def begin_request(
        self, name: str, carrier: Mapping[str, str], start_s: float, attributes: Attributes
    ) -> Span:
        return NO_SPAN

    def begin(
        self, name: str, parent: str, start_s: float, attributes: Attributes = NO_ATTRIBUTES
    ) -> Span:
        return NO_SPAN

    def record(
        self,
        name: str,
        parent: str,
        start_s: float,
        end_s: float,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> None: ...

    def measure(self, measure: Measure, seconds: float, attributes: Attributes) -> None: ...


NO_SPANS: Spans = _NoSpans()


class _TracingDisabled:
    def service(self, name: str) -> Spans:
        return NO_SPANS

    def close(self) -> None: ...


OFF: Tracing = _TracingDisabled()

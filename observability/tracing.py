"""Spans: what happened to one request, from when to when, and its parent.

A span's context is a W3C `traceparent`: a string that headers and messages carry, empty if it is
not recorded, because tracing is off or the request was not sampled. A span under an empty one is
`NO_SPAN` and costs nothing. OpenTelemetry is imported only when tracing is on. Times are readings
of the process's monotonic clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]

NOTHING: Attributes = {}
REQUEST_ID = "foretoken.request.id"  # of one choice's submission, as in scheduler and workers


class Span(Protocol):
    """An open span, ended once. Later calls have no effect."""

    @property
    def traceparent(self) -> str:
        """The context of its children; empty if it is not recorded."""
        ...

    @property
    def trace_id(self) -> str:
        """32 hex digits, also of an unsampled one; empty while tracing is off."""
        ...

    def put(self, attributes: Attributes) -> None: ...

    def mark(self, name: str, at_s: float) -> None:
        """Adds an event."""
        ...

    def fail(self, why: str) -> None: ...

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

    def take_in(
        self, name: str, carrier: Mapping[str, str], start_s: float, attributes: Attributes
    ) -> Span:
        """The span of a client's request: under the `traceparent` and `tracestate` of the carrier
        if these are valid, else the root of a new trace. The client's sampling decision applies
        if present and trusted, else the configured share."""
        ...

    def begin(
        self, name: str, parent: str, start_s: float, attributes: Attributes = NOTHING
    ) -> Span:
        """NO_SPAN for an empty or invalid parent."""
        ...

    def record(
        self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes = NOTHING
    ) -> None:
        """Records a span that is already over."""
        ...

    def measure(self, measure: Measure, seconds: float, attributes: Attributes) -> None:
        """Adds a measurement to a metric, whether sampled or not."""
        ...


class Tracing(Protocol):
    """The tracing of one process, with the spans of its services."""

    def service(self, name: str) -> Spans: ...

    def close(self) -> None:
        """Exports what is queued, for a bounded time."""
        ...


class _NoSpan:
    traceparent = ""
    trace_id = ""

    def put(self, attributes: Attributes) -> None: ...
    def mark(self, name: str, at_s: float) -> None: ...
    def fail(self, why: str) -> None: ...
    def end(self, at_s: float) -> None: ...


NO_SPAN: Span = _NoSpan()


class _NoSpans:
    on = False

    def take_in(
        self, name: str, carrier: Mapping[str, str], start_s: float, attributes: Attributes
    ) -> Span:
        return NO_SPAN

    def begin(
        self, name: str, parent: str, start_s: float, attributes: Attributes = NOTHING
    ) -> Span:
        return NO_SPAN

    def record(
        self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes = NOTHING
    ) -> None: ...

    def measure(self, measure: Measure, seconds: float, attributes: Attributes) -> None: ...


NO_SPANS: Spans = _NoSpans()


class _TracingDisabled:
    def service(self, name: str) -> Spans:
        return NO_SPANS

    def close(self) -> None: ...


OFF: Tracing = _TracingDisabled()


@dataclass(frozen=True, slots=True)
class ExporterConfig:
    """The exporter's settings: endpoint, sampling share, and limits."""

    endpoint: str  # of an OTLP collector over gRPC: host:port, http:// or https://
    sample: float = 1.0  # share of requests without a client's decision
    queue_spans: int = 4_096  # waiting to be exported; the oldest are dropped above
    delay_s: float = 2.0  # the longest wait for other spans to export together
    timeout_s: float = 5.0  # for one export with retries
    metrics_interval_s: float = 15.0
    trust_clients: bool = True  # whether a client's sampling decision applies

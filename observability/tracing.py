"""Spans of requests. The classes record nothing; `observability.otel` has those that do.

A span's context is a W3C `traceparent`, a string that headers and messages carry. It is empty if
the span is not recorded, because tracing is off or the request is not sampled; spans below it are
`NO_SPAN` and cost nothing. Times are readings of the process's monotonic clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]

NO_ATTRIBUTES: Attributes = {}
REQUEST_ID = "foretoken.request.id"  # attribute: the id in scheduler and workers


class Span:
    """An open span. Calls after `end` have no effect."""

    __slots__ = ()
    traceparent: str = ""  # the context of child spans; empty if the span is not recorded
    trace_id: str = ""  # 32 hex digits, also if the span is not sampled; empty while tracing is off

    def put(self, attributes: Attributes) -> None: ...

    def rename(self, name: str) -> None: ...

    def mark(self, name: str, at_s: float) -> None:
        """Adds an event."""

    def fail(self, reason: str) -> None: ...

    def end(self, at_s: float) -> None: ...


NO_SPAN = Span()


@dataclass(frozen=True, slots=True)
class Measure:
    """A histogram of seconds, named as in OpenTelemetry's conventions."""

    name: str
    help: str
    buckets: tuple[float, ...]


class Spans:
    """The spans of one service in one process. Thread-safe."""

    on = False  # whether spans are recorded

    def begin_request(
        self, name: str, carrier: Mapping[str, str], start_s: float, attributes: Attributes
    ) -> Span:
        """The span of a client's request: under the `traceparent` and `tracestate` of the carrier
        if these are valid, else the root of a new trace. The client's sampling decision applies
        if present and trusted, else the configured share."""
        return NO_SPAN

    def begin(
        self, name: str, parent: str, start_s: float, attributes: Attributes = NO_ATTRIBUTES
    ) -> Span:
        """NO_SPAN for an empty or invalid parent."""
        return NO_SPAN

    def record(
        self,
        name: str,
        parent: str,
        start_s: float,
        end_s: float,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> None:
        """Records a span that has ended."""
        self.begin(name, parent, start_s, attributes).end(end_s)

    def measure(self, measure: Measure, seconds: float, attributes: Attributes) -> None:
        """Adds a measurement to a metric, independent of sampling."""


NO_SPANS = Spans()


class Tracing:
    """The tracing of one process."""

    def service(self, name: str) -> Spans:
        return NO_SPANS

    def close(self) -> None:
        """Exports queued spans and metrics, for a bounded time."""


OFF = Tracing()

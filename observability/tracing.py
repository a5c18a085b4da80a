"""Spans as services make them: what happened to one request, from when until when, and within what.

A span's place is told by a W3C `traceparent`: a string that headers and messages carry, empty where
nobody records it, because tracing is off or the request was not sampled. What is begun under an
empty one is `NO_SPAN` and costs nothing; nothing of OpenTelemetry is imported until it is on.
Times are readings of the process's monotonic clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]

NOTHING: Attributes = {}
REQUEST_ID = "foretoken.request.id"  # of one choice's submission, as scheduler and workers know it


class Span(Protocol):
    """Something under way; ended once. What comes after its end changes nothing."""

    @property
    def traceparent(self) -> str:
        """What its children are begun under; empty where it isn't recorded."""
        ...

    @property
    def trace_id(self) -> str:
        """32 hex digits, of one that isn't sampled too; empty where tracing is off."""
        ...

    def put(self, attributes: Attributes) -> None: ...

    def mark(self, name: str, at_s: float) -> None:
        """Something happened within it."""
        ...

    def fail(self, why: str) -> None: ...

    def end(self, at_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Measure:
    """A histogram of seconds, as OpenTelemetry's conventions name it."""

    name: str
    help: str
    buckets: tuple[float, ...]


class Spans(Protocol):
    """One service's, in one process. Safe to use from every thread."""

    @property
    def on(self) -> bool:
        """Whether it is worth the asking."""
        ...

    def take_in(
        self, name: str, carrier: Mapping[str, str], start_s: float, attributes: Attributes
    ) -> Span:
        """A client's request: under the `traceparent` and `tracestate` of the carrier where these
        are there and sound, else the first span of a trace of its own. Whether it is sampled is
        the client's to say where it said so and is trusted, else the share's."""
        ...

    def begin(
        self, name: str, parent: str, start_s: float, attributes: Attributes = NOTHING
    ) -> Span:
        """NO_SPAN where the parent is empty or none."""
        ...

    def record(
        self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes = NOTHING
    ) -> None:
        """One that is over already."""
        ...

    def measure(self, measure: Measure, seconds: float, attributes: Attributes) -> None:
        """Count one into a metric, sampled or not."""
        ...


class Tracing(Protocol):
    """Of one process: where the spans of its services go."""

    def service(self, name: str) -> Spans: ...

    def close(self) -> None:
        """Send what waits, for a bounded time."""
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


class _Off:
    def service(self, name: str) -> Spans:
        return NO_SPANS

    def close(self) -> None: ...


OFF: Tracing = _Off()


@dataclass(frozen=True, slots=True)
class Exporting:
    """Where to, how many of the requests that bring no decision of their own, and the bounds."""

    endpoint: str  # of a collector that speaks OTLP over gRPC: host:port, http:// or https://
    sample: float = 1.0  # share
    queue_spans: int = 4_096  # that wait to be sent; beyond it the oldest go
    delay_s: float = 2.0  # that a span waits at most, for others to be sent with
    timeout_s: float = 5.0  # of sending once, retries included
    metrics_interval_s: float = 15.0
    trust_clients: bool = True  # whether a client's decision holds; else its request is as others

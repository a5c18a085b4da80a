"""A collector that receives OTLP over gRPC and stores it, and spans that are stored in memory."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint

from observability.tracing import NO_ATTRIBUTES, Attributes, Measure, Span, Spans


@dataclass(frozen=True)
class Seen:
    """A received span."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty for the root of a trace
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: tuple[str, ...]
    failed: str  # the error; empty without one


@dataclass
class Collector:
    """An OTLP collector that listens on `address`."""

    address: str = ""
    spans: list[Seen] = field(default_factory=list)
    points: dict[str, list[tuple[dict[str, Any], HistogramDataPoint]]] = field(
        default_factory=dict
    )  # the last received, by metric

    def of(self, trace_id: str) -> list[Seen]:
        return [span for span in self.spans if span.trace_id == trace_id]


class _Traces(trace_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector):
        self._collector = collector

    def Export(
        self, request: trace_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_pb2.ExportTraceServiceResponse:
        for each in request.resource_spans:
            service = _plain(each.resource.attributes)["service.name"]
            for span in [span for scope in each.scope_spans for span in scope.spans]:
                self._collector.spans.append(
                    Seen(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _plain(span.attributes),
                        tuple(event.name for event in span.events),
                        span.status.message,
                    )
                )
        return trace_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector):
        self._collector = collector

    def Export(
        self, request: metrics_pb2.ExportMetricsServiceRequest, context: Any
    ) -> metrics_pb2.ExportMetricsServiceResponse:
        for each in request.resource_metrics:
            for metric in [metric for scope in each.scope_metrics for metric in scope.metrics]:
                points = metric.histogram.data_points
                known = [(_plain(point.attributes), point) for point in points]
                self._collector.points[metric.name] = known
        return metrics_pb2.ExportMetricsServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of the loopback."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    register: Any = trace_grpc  # which has no types
    register.add_TraceServiceServicer_to_server(_Traces(collector), server)
    register = metrics_grpc
    register.add_MetricsServiceServicer_to_server(_Metrics(collector), server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in _typed(attributes)}


def _typed(attributes: Any) -> list[KeyValue]:
    return list(attributes)


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


@dataclass
class Written(Span):
    """A span stored in memory."""

    name: str
    parent: str
    start_s: float
    traceparent: str
    trace_id: str = ""
    end_s: float | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    marks: list[tuple[str, float]] = field(default_factory=list)

    def put(self, attributes: Attributes) -> None:
        self.attributes.update(attributes)

    def rename(self, name: str) -> None:
        self.name = name

    def mark(self, name: str, at_s: float) -> None:
        self.marks.append((name, at_s))

    def fail(self, reason: str) -> None:
        self.attributes["failed"] = reason

    def end(self, at_s: float) -> None:
        assert self.end_s is None, f"{self.name} ended twice"
        self.end_s = at_s


class WrittenSpans(Spans):
    """Spans stored in memory; the traceparent of the n-th is `#n`."""

    on = True

    def __init__(self) -> None:
        self.all: list[Written] = []
        self.measured: list[tuple[str, float, dict[str, Any]]] = []

    def begin_request(
        self, name: str, carrier: Mapping[str, str], start_s: float, attributes: Attributes
    ) -> Span:
        return self.begin(name, carrier.get("traceparent", "new"), start_s, attributes)

    def begin(
        self, name: str, parent: str, start_s: float, attributes: Attributes = NO_ATTRIBUTES
    ) -> Span:
        number = len(self.all)
        span = Written(
            name, parent, start_s, f"#{number}", f"trace-{number}", attributes=dict(attributes)
        )
        self.all.append(span)
        return span

    def measure(self, measure: Measure, seconds: float, attributes: Attributes) -> None:
        self.measured.append((measure.name, seconds, dict(attributes)))

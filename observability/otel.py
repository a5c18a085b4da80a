"""Spans and metrics with OpenTelemetry's SDK, exported by OTLP. Imported only when tracing is on.

Nothing is installed globally, so several `OtelTracing` may coexist in one process. Queues are
bounded, and threads export them.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Histogram, Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio, Sampler, TraceIdRatioBased
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import (
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from observability.collector import Outage
from observability.tracing import (
    NO_ATTRIBUTES,
    NO_SPAN,
    Attributes,
    Measure,
    Span,
    Spans,
    Tracing,
)

log = logging.getLogger(__name__)

SCOPE = "foretoken"
NAMESPACE = "foretoken"
BATCH_SPANS = 512  # per message, about 200 kB
CLOSE_S = 2.0  # time to export the last spans
MAX_PARENTS = 1_024  # cached parents, 1 kB each

_W3C = TraceContextTextMapPropagator()


def unix_ns(at_s: float) -> int:
    """A reading of the monotonic clock as Unix time."""
    return time.time_ns() + round((at_s - time.monotonic()) * 1e9)


@lru_cache(MAX_PARENTS)
def _parse_parent(parent: str) -> Context | None:
    """None for an invalid traceparent. Cached, because all spans of a request have one parent."""
    context = _W3C.extract({"traceparent": parent})
    return context if get_current_span(context).get_span_context().is_valid else None


class OtelTracing(Tracing):
    """Tracing by OTLP. The settings are those of section `tracing` of the configuration."""

    def __init__(
        self,
        *,
        endpoint: str,
        sample: float,
        trust_clients: bool,
        queue_spans: int,
        delay_s: float,
        timeout_s: float,
        metrics_interval_s: float,
    ):
        self._endpoint = endpoint if "://" in endpoint else f"http://{endpoint}"
        self._timeout_s, self._metrics_interval_s = timeout_s, metrics_interval_s
        self._outage = Outage(self._endpoint)
        self._internal: Sampler = ParentBasedTraceIdRatio(sample)
        self._clients = self._internal if trust_clients else TraceIdRatioBased(sample)
        self._spans = _SpanExporter(self._endpoint, timeout_s, self._outage)
        self._processor: SpanProcessor = BatchSpanProcessor(
            self._spans,
            max_queue_size=queue_spans,
            schedule_delay_millis=delay_s * 1e3,
            max_export_batch_size=min(BATCH_SPANS, queue_spans),
        )
        self._lock = threading.Lock()  # guards the fields below, which only grow
        self._services: dict[str, Spans] = {}
        self._metrics: list[tuple[MeterProvider, _MetricExporter]] = []

    def service(self, name: str) -> Spans:
        """The spans of a service, which is a separate resource even in a shared process."""
        with self._lock:
            if name not in self._services:
                self._services[name] = self._make(name)
            return self._services[name]

    def close(self) -> None:
        """Takes at most 2 * CLOSE_S, even without an answer of the collector. Never raises."""
        flushing = threading.Thread(target=self._flush, daemon=True, name="last-spans")
        flushing.start()
        flushing.join(CLOSE_S)
        if flushing.is_alive():  # abort the remaining exports
            self._spans.shutdown()
            for _, exporter in tuple(self._metrics):
                exporter.shutdown()
            flushing.join(CLOSE_S)
        self._outage.close()

    def _make(self, name: str) -> Spans:
        resource = Resource.create(
            {
                "service.name": f"{NAMESPACE}-{name}",
                "service.namespace": NAMESPACE,
                "host.name": socket.gethostname(),
                "process.pid": os.getpid(),
            }
        )
        internal = self._tracer(self._internal, resource)
        same = self._clients is self._internal
        clients = internal if same else self._tracer(self._clients, resource)
        return OtelSpans(internal, clients, lambda: self._meter(resource))

    def _tracer(self, sampler: Sampler, resource: Resource) -> Tracer:
        provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        return provider.get_tracer(SCOPE)

    def _flush(self) -> None:
        try:
            self._processor.shutdown()
            for provider, _ in tuple(self._metrics):
                provider.shutdown(CLOSE_S * 1e3)
        except Exception as error:  # raised if a reader could not export
            log.info("the last spans or metrics were not exported: %s", error)

    def _meter(self, resource: Resource) -> Meter:
        """Created on the first measurement, with a thread that exports periodically."""
        exporter = _MetricExporter(self._endpoint, self._timeout_s, self._outage)
        reader = PeriodicExportingMetricReader(exporter, self._metrics_interval_s * 1e3)
        provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        with self._lock:
            self._metrics.append((provider, exporter))
        return provider.get_meter(SCOPE)


class OtelSpans(Spans):
    """Spans by OpenTelemetry's tracers."""

    on = True

    def __init__(self, internal: Tracer, clients: Tracer, make_meter: Callable[[], Meter]):
        """`clients` samples clients' requests; `internal` makes all other spans."""
        self._internal, self._clients = internal, clients
        self._make_meter = make_meter
        self._lock = threading.Lock()  # guards the creation of the meter and its histograms
        self._meter: Meter | None = None
        self._histograms: dict[str, Histogram] = {}

    def begin_request(
        self, name: str, carrier: Mapping[str, str], start_s: float, attributes: Attributes
    ) -> Span:
        context = _W3C.extract(carrier)
        return _start(self._clients, name, context, start_s, attributes, SpanKind.SERVER)

    def begin(
        self, name: str, parent: str, start_s: float, attributes: Attributes = NO_ATTRIBUTES
    ) -> Span:
        context = _parse_parent(parent) if parent else None
        if context is None:
            return NO_SPAN
        return _start(self._internal, name, context, start_s, attributes, SpanKind.INTERNAL)

    def measure(self, measure: Measure, seconds: float, attributes: Attributes) -> None:
        histogram = self._histograms.get(measure.name) or self._make(measure)
        histogram.record(seconds, attributes)

    def _make(self, measure: Measure) -> Histogram:
        """Creates each histogram once, from any thread."""
        with self._lock:
            if made := self._histograms.get(measure.name):
                return made
            self._meter = self._meter or self._make_meter()
            made = self._meter.create_histogram(
                measure.name,
                "s",
                measure.help,
                explicit_bucket_boundaries_advisory=measure.buckets,
            )
            self._histograms[measure.name] = made
            return made


def _start(
    tracer: Tracer,
    name: str,
    context: Context,
    start_s: float,
    attributes: Attributes,
    kind: SpanKind,
) -> Span:
    start_ns = unix_ns(start_s)
    started = tracer.start_span(name, context, kind, attributes, start_time=start_ns)
    return OtelSpan(started, start_ns)


class OtelSpan(Span):
    """A span of OpenTelemetry."""

    __slots__ = ("_span", "_start_ns", "trace_id", "traceparent")

    def __init__(self, span: SdkSpan, start_ns: int):
        self._span, self._start_ns = span, start_ns
        context = span.get_span_context()
        self.trace_id = format_trace_id(context.trace_id) if context.is_valid else ""
        self.traceparent = ""
        if span.is_recording():
            span_id, flags = format_span_id(context.span_id), context.trace_flags
            self.traceparent = f"00-{self.trace_id}-{span_id}-{flags:02x}"

    def put(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def mark(self, name: str, at_s: float) -> None:
        self._span.add_event(name, timestamp=unix_ns(at_s))

    def fail(self, reason: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, reason))

    def end(self, at_s: float) -> None:
        # not before the start: unix_ns reads two clocks, and its error is a few ns
        self._span.end(max(self._start_ns, unix_ns(at_s)))


class _SpanExporter(OTLPSpanExporter):
    """Reports the result of each batch to an Outage."""

    def __init__(self, endpoint: str, timeout_s: float, outage: Outage):
        super().__init__(endpoint=endpoint, timeout=timeout_s)
        self._outage = outage

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self._outage.record_export("traces", result is SpanExportResult.SUCCESS)
        return result


class _MetricExporter(OTLPMetricExporter):
    """Reports the result of each batch to an Outage."""

    def __init__(self, endpoint: str, timeout_s: float, outage: Outage):
        super().__init__(endpoint=endpoint, timeout=timeout_s)
        self._outage = outage

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
    ) -> MetricExportResult:
        result = super().export(metrics_data, timeout_millis, **kwargs)
        self._outage.record_export("metrics", result is MetricExportResult.SUCCESS)
        return result

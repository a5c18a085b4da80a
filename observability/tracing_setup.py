"""Opens tracing as configured. OpenTelemetry is imported only when tracing is on."""

from observability.tracing import OFF, ExporterConfig, Tracing


def open_tracing(to: ExporterConfig) -> Tracing:
    """`OFF` without an endpoint. The collector need not be reachable yet."""
    if not to.endpoint:
        return OFF
    from observability.otel import OtelTracing

    return OtelTracing(to)

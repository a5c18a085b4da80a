"""Tracing settings of all processes, and traces of unary calls.

Requests travel on streams that live as long as their processes, so their messages carry the trace
context. Unary calls such as `Why` carry it in their metadata and are spans of their own.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

import grpc
from grpc import aio
from pydantic import Field

from observability.logs import add_log_context
from observability.tracing import OFF, Spans, Tracing
from services.runtime.config import Settings, load

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"

_traceparent: ContextVar[str] = ContextVar("traceparent", default="")  # of the call being served

Call = Callable[[Any, Any], Awaitable[Any]]


class TracingConfig(Settings):
    """Section `tracing`."""

    section: ClassVar[str] = "tracing"

    # OTLP collector over gRPC: host:port, http://host:port or https://host:port. Empty: off.
    endpoint: str = ""
    # Sampled share of the requests that arrive without a sampling decision (W3C Trace Context).
    sample: float = Field(default=1.0, ge=0, le=1)
    # False: the share applies to all requests, and a client's sampling flag has no effect; its
    # trace id is kept.
    trust_clients: bool = True
    # Queued spans, about 2 kB each, ten per request. A full queue drops the oldest.
    queue_spans: int = Field(default=4_096, ge=1)
    delay_s: float = Field(default=2.0, gt=0)  # the longest wait of a span for others in its batch
    timeout_s: float = Field(default=5.0, gt=0)  # of one export with retries; then it is dropped
    metrics_interval_s: float = Field(default=15.0, gt=0)  # between exports of gen_ai.server.*

    def open(self) -> Tracing:
        """OFF without an endpoint. The collector need not be reachable yet."""
        if not self.endpoint:
            return OFF
        from observability.otel import OtelTracing  # imports OpenTelemetry

        return OtelTracing(**dict(self))


def open_tracing(overrides: Mapping[str, str] | None = None) -> Tracing:
    """Tracing as configured, which the caller closes. Raises ConfigError."""
    return load(TracingConfig, overrides).open()


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata that continues the trace of the call that this task serves in another service."""
    traceparent = _traceparent.get()
    return ((TRACEPARENT, traceparent),) if traceparent else ()


def interceptors(spans: Spans) -> Sequence[aio.ServerInterceptor]:
    """The server interceptors of tracing; none while it is off."""
    return (TracedCalls(spans),) if spans.on else ()


class TracedCalls(aio.ServerInterceptor):
    """Records a span for each unary call with a trace context. Calls without one, such as health
    checks, cost one metadata lookup."""

    def __init__(self, spans: Spans):
        self._spans = spans

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.response_streaming:
            return handler
        parent = dict(handler_call_details.invocation_metadata).get(TRACEPARENT)
        if not parent:
            return handler
        return grpc.unary_unary_rpc_method_handler(
            self._traced(handler.unary_unary, handler_call_details.method, str(parent)),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _traced(self, inner: Call, method: str, parent: str) -> Call:
        async def call(request: Any, context: Any) -> Any:
            attributes = {"rpc.system": "grpc", "rpc.method": method}
            carrier = {TRACEPARENT: parent}  # a client may have sent it
            span = self._spans.begin_request(
                method.strip("/"), carrier, time.monotonic(), attributes
            )
            _traceparent.set(span.traceparent)
            add_log_context(trace_id=span.trace_id)
            try:
                return await inner(request, context)
            except BaseException as error:
                span.fail(str(error) or type(error).__name__)
                raise
            finally:
                span.end(time.monotonic())

        return call

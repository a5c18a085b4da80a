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

from observability.logs import about
from observability.tracing import ExporterConfig, Spans, Tracing
from observability.tracing_setup import open_tracing
from services.runtime.config import Settings, load

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"

_calling: ContextVar[str] = ContextVar("calling", default="")

Call = Callable[[Any, Any], Awaitable[Any]]


class TracingConfig(Settings):
    """Section `tracing`."""

    section: ClassVar[str] = "tracing"

    # OTLP collector over gRPC: host:port, http://host:port or https://host:port. Empty: off.
    endpoint: str = ""
    # Share of the requests without a sampling decision of their client; others keep theirs (W3C
    # Trace Context).
    sample: float = Field(default=1.0, ge=0, le=1)
    # False: the share applies to all requests, and a client's flag has no effect; its trace id
    # stays.
    trust_clients: bool = True
    # Spans waiting to be sent, about 2 kB each; the oldest are dropped above. A request makes about
    # ten.
    queue_spans: int = Field(default=4_096, ge=1)
    delay_s: float = Field(default=2.0, gt=0)  # that a span waits for others to be sent together
    timeout_s: float = Field(default=5.0, gt=0)  # for one export with retries; then it is dropped
    metrics_interval_s: float = Field(default=15.0, gt=0)  # of gen_ai.server.* metrics

    def open(self) -> Tracing:
        return open_tracing(
            ExporterConfig(
                self.endpoint,
                self.sample,
                self.queue_spans,
                self.delay_s,
                self.timeout_s,
                self.metrics_interval_s,
                self.trust_clients,
            )
        )


def tracing_of(overrides: Mapping[str, str] | None = None) -> Tracing:
    """The process's tracing. Raises ConfigError. The caller closes it."""
    return load(TracingConfig, overrides).open()


def outgoing() -> tuple[tuple[str, str], ...]:
    """Metadata for calls to other services on behalf of the call that this task serves."""
    calling = _calling.get()
    return ((TRACEPARENT, calling),) if calling else ()


def interceptors(spans: Spans) -> Sequence[aio.ServerInterceptor]:
    """The server interceptors for tracing; none while it is off."""
    return (TracedCalls(spans),) if spans.on else ()


class TracedCalls(aio.ServerInterceptor):
    """A span for each unary call with a trace context. Calls without one, such as polls and health
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
            known = {TRACEPARENT: parent}  # possibly of a client: sampled like a client's
            span = self._spans.take_in(method.strip("/"), known, time.monotonic(), attributes)
            _calling.set(span.traceparent)
            about(trace_id=span.trace_id)
            try:
                return await inner(request, context)
            except BaseException as error:
                span.fail(str(error) or type(error).__name__)
                raise
            finally:
                span.end(time.monotonic())

        return call

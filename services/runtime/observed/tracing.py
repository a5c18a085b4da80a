"""Settings of tracing, shared by all processes, and the unary calls that belong to a trace.

Requests travel on streams that live as long as their processes: their messages carry what they are
traced under. Calls of their own, as `Why`, carry it in their metadata, and are spans of their own.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

import grpc
from grpc import aio
from pydantic import Field

from observability.logs import about
from observability.tracing import Exporting, Spans, Tracing, open_tracing
from services.runtime.config import Settings, load

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"

_calling: ContextVar[str] = ContextVar("calling", default="")

Call = Callable[[Any, Any], Awaitable[Any]]


class TracingConfig(Settings):
    """Section `tracing`."""

    section: ClassVar[str] = "tracing"

    # Of an OTLP collector over gRPC: host:port, http://host:port or https://host:port. Empty: off.
    endpoint: str = ""
    # Of the requests that come without a decision of their client's; those with one keep it, as
    # W3C's trace context has it.
    sample: float = Field(default=1.0, ge=0, le=1)
    # False: the share holds for those too, and a client's flag decides nothing; its trace id stays.
    trust_clients: bool = True
    # Spans that wait to be sent, some 2 kB each; then the oldest go. A request makes about ten.
    queue_spans: int = Field(default=4_096, ge=1)
    delay_s: float = Field(default=2.0, gt=0)  # that a span waits for others to be sent with
    timeout_s: float = Field(default=5.0, gt=0)  # to send once, with retries; then it is dropped
    metrics_interval_s: float = Field(default=15.0, gt=0)  # of gen_ai.server.* metrics

    def open(self) -> Tracing:
        return open_tracing(
            Exporting(
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
    """As a process is told to; raises ConfigError. Whoever opens it closes it."""
    return load(TracingConfig, overrides).open()


def outgoing() -> tuple[tuple[str, str], ...]:
    """Metadata for calls to others on behalf of the call that this task serves."""
    calling = _calling.get()
    return ((TRACEPARENT, calling),) if calling else ()


def interceptors(spans: Spans) -> Sequence[aio.ServerInterceptor]:
    """What a server needs beside its servicers; nothing while tracing is off."""
    return (TracedCalls(spans),) if spans.on else ()


class TracedCalls(aio.ServerInterceptor):
    """A span for each unary call that comes with a trace. One that comes without, as polls and
    health checks do, costs a look at its metadata."""

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
            known = {TRACEPARENT: parent}  # a client's perhaps: it is sampled as a client's is
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

"""Unary calls with a trace context: spans, outgoing metadata, and log lines."""

import io
import json
import logging
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from observability.logs import JsonLines, LogHandler, RepeatFilter
from observability.tracing import NO_SPANS
from services.runtime.telemetry.tracing import TRACEPARENT, interceptors, trace_metadata
from tests.observability.tracing.otlp import WrittenSpans

METHOD = "/foretoken.v1.Scheduler/Why"


@dataclass
class Details:
    invocation_metadata: tuple[tuple[str, str], ...]
    method: str = METHOD


@pytest.mark.parametrize("traced", [True, False])
async def test_traced_call_propagates_its_context(traced: bool) -> None:
    stream, spans = io.StringIO(), WrittenSpans()
    called: list[tuple[str, str]] = []
    handler = LogHandler(stream, RepeatFilter())
    handler.setFormatter(JsonLines("scheduler"))
    logger = logging.Logger("services.some")
    logger.addHandler(handler)

    async def serve(request: Any, context: Any) -> str:
        logger.info("asked")
        called.extend(trace_metadata())
        return "answer"

    async def find(_: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(serve)

    [interceptor] = interceptors(spans)
    details = Details(((TRACEPARENT, "theirs"),) if traced else ())
    found: Any = await interceptor.intercept_service(find, details)  # type: ignore[arg-type]  # a duck-typed HandlerCallDetails
    assert await found.unary_unary(None, None) == "answer"
    line = json.loads(stream.getvalue())
    if not traced:
        assert (spans.all, called, "trace_id" in line) == ([], [], False)
        return
    [span] = spans.all
    assert (span.name, span.parent, span.end_s is None) == (METHOD[1:], "theirs", False)
    assert called == [(TRACEPARENT, span.traceparent)]
    assert line["trace_id"] == span.trace_id


def test_disabled_tracing_has_no_interceptors() -> None:
    assert interceptors(NO_SPANS) == ()

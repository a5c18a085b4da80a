"""Ways to another service: over a socket, or to a servicer in this very process.

Both give the generated stubs what they expect, so a caller never knows which it has. In process,
messages are handed over as they are: neither side may change one after passing it on.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import grpc
from grpc import aio

from services.runtime.errors import guard

MAX_MESSAGE_BYTES = 16 * 2**20  # a 100,000-token prompt is under 0.5 MiB; a round of 4,096 too
OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Two servers of one host must not share subchannels of an old address.
    ("grpc.use_local_subchannel_pool", 1),
)


def connect(address: str) -> aio.Channel:
    """A channel to `host:port` or `unix:/path`, with keep-alive and message bounds."""
    return aio.insecure_channel(address, options=OPTIONS)


class InProcessServer:
    """Takes servicers as a grpc server does; `channel()` reaches them without a socket."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Part of the generated registration; the registered handlers below say it all."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}": guard(h) for name, h in handlers.items()}

    def channel(self) -> aio.Channel:
        return cast(aio.Channel, _InProcessChannel(self._handlers))


class _InProcessChannel:
    def __init__(self, handlers: dict[str, Any]):
        self._handlers = handlers

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Callable[..., Awaitable[Any]]:
        handler = self._handlers[method].unary_unary

        async def call(request: Any, timeout: float | None = None, **_: Any) -> Any:
            try:
                async with asyncio.timeout(timeout):
                    return await handler(request, _Context())
            except TimeoutError:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
                raise _rpc_error(code, f"{method} took over {timeout} s") from None

        return call

    def unary_stream(self, method: str, *_: Any, **__: Any) -> Callable[..., "_Call"]:
        return lambda request, **_: _Call(self._handlers[method].unary_stream, request)

    def stream_stream(self, method: str, *_: Any, **__: Any) -> Callable[..., "_Call"]:
        return lambda requests, **_: _Call(self._handlers[method].stream_stream, requests)

    async def close(self, grace: float | None = None) -> None:
        """Nothing is open."""


class _Call:
    """A response stream: iterate it, or cancel it from another task."""

    def __init__(self, handler: Callable[[Any, Any], AsyncIterator[Any]], request: Any):
        self._responses = handler(request, _Context())
        self._reader: asyncio.Task[Any] | None = None
        self._cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        self._reader = asyncio.current_task()
        try:
            async for response in self._responses:
                yield response
                if self._cancelled:
                    return
        finally:
            self._reader = None
            await cast(Any, self._responses).aclose()

    def cancel(self) -> bool:
        self._cancelled = True
        return self._reader is not None and self._reader.cancel()


class _Context:
    """What our servicers ask of a ServicerContext, without a connection."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> None:
        raise _rpc_error(code, details, trailing_metadata)

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def cancelled(self) -> bool:
        return False

    def peer(self) -> str:
        return "in-process"


def _rpc_error(code: grpc.StatusCode, details: str, trailers: Any = ()) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailers), details)

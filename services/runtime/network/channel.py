"""Channels to other services: over a socket, or to a servicer in the same process.

Both have the interface that generated stubs expect. In process, messages are passed by reference:
neither side may change a message after sending it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from ipaddress import ip_address
from typing import Any, cast

import grpc
from grpc import aio

from services.runtime.errors import guard

Options = Sequence[tuple[str, Any]]

MAX_MESSAGE_BYTES = 16 * 2**20  # a 100,000-token prompt is under 0.5 MiB; a round of 4,096 too
OPTIONS: Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A restarted server must not be reached through a subchannel of its old address.
    ("grpc.use_local_subchannel_pool", 1),
)

Handler = Callable[[Any, Any], AsyncIterator[Any]]
_END = object()  # follows the last response


def host_port(host: str, port: int | str) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches `host:port`. Names other than localhost may be anything."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def connect(address: str, options: Options = OPTIONS) -> aio.Channel:
    """A plain channel to `host:port` or `unix:/path`, with keep-alive and message bounds."""
    return aio.insecure_channel(address, options=options)


class InProcessServer:
    """Registers servicers like a gRPC server; `channel()` connects to them without a socket."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Called by generated code; does nothing, because the registered handlers suffice."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}": guard(h) for name, h in handlers.items()}

    def channel(self) -> aio.Channel:
        return cast(aio.Channel, _InProcessChannel(self._handlers))


class _InProcessChannel:
    """Resolves methods when they are called: stubs may be created before the servicers."""

    def __init__(self, handlers: dict[str, Any]):
        self._handlers = handlers

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, timeout: float | None = None, **_: Any) -> Any:
            with _statuses(method, timeout):
                async with asyncio.timeout(timeout):
                    return await self._handlers[method].unary_unary(request, _Context())

        return call

    def unary_stream(self, method: str, *_: Any, **__: Any) -> Callable[..., "_Call"]:
        return lambda *a, **k: _Call(method, self._handlers[method].unary_stream, *a, **k)

    def stream_stream(self, method: str, *_: Any, **__: Any) -> Callable[..., "_Call"]:
        return lambda *a, **k: _Call(method, self._handlers[method].stream_stream, *a, **k)

    async def close(self, grace: float | None = None) -> None:
        """Does nothing."""


class _Call:
    """A response stream, cancelled when it is no longer referenced.

    The handler runs in a separate task, at most one response ahead of the reader. Reading from a
    cancelled call raises CancelledError without cancelling the reader.
    """

    def __init__(
        self, method: str, handler: Handler, request: Any, timeout: float | None = None, **_: Any
    ):
        # bounded by `_room`, except for _END
        self._responses: asyncio.Queue[Any] = asyncio.Queue()
        self._room = asyncio.Semaphore(1)
        self._handler = asyncio.ensure_future(
            _run(method, handler(request, _Context()), timeout, self._responses, self._room)
        )
        self._handler.add_done_callback(partial(_end, self._responses))

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            response = await self._responses.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if response is not _END:
            self._room.release()
            return response
        self._responses.put_nowait(_END)
        self._handler.result()
        raise StopAsyncIteration

    def cancel(self) -> bool:
        return self._handler.cancel()

    def __del__(self) -> None:
        if not self._handler.done() and not self._handler.get_loop().is_closed():
            self._handler.cancel()


async def _run(
    method: str,
    responses: AsyncIterator[Any],
    timeout: float | None,
    outbox: asyncio.Queue[Any],
    room: asyncio.Semaphore,
) -> None:
    with _statuses(method, timeout):
        async with asyncio.timeout(timeout), aclosing(cast(Any, responses)):
            async for response in responses:
                await room.acquire()
                outbox.put_nowait(response)


def _end(outbox: asyncio.Queue[Any], handler: asyncio.Future[None]) -> None:
    outbox.put_nowait(_END)
    if not handler.cancelled():
        handler.exception()  # retrieved, in case the reader stops before the end


@contextmanager
def _statuses(method: str, timeout: float | None) -> Iterator[None]:
    """Raises aborts and deadlines as the status that a caller over a socket would receive."""
    try:
        yield
    except _Aborted as aborted:
        raise _rpc_error(aborted.code, aborted.details, aborted.trailers) from None
    except TimeoutError:
        code = grpc.StatusCode.DEADLINE_EXCEEDED
        raise _rpc_error(code, f"{method} took over {timeout} s") from None


class _Aborted(aio.AbortError):
    """Raised by a servicer's `abort` in process."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Any):
        super().__init__(details)
        self.code, self.details, self.trailers = code, details, trailers


class _Context:
    """The part of ServicerContext that servicers use."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> None:
        raise _Aborted(code, details, trailing_metadata)

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def cancelled(self) -> bool:
        return False

    def peer(self) -> str:
        return "in-process"

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return {}


def _rpc_error(code: grpc.StatusCode, details: str, trailers: Any = ()) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailers), details)

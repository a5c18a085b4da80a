"""A gateway that leaves its port to others: it accepts no connection, and ends its own."""

import asyncio

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.faces.http.serve import bind_http, serve_http
from services.runtime.tasks import background

LIMIT_S = 30
REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


def streaming(end: asyncio.Event) -> ASGIApp:
    """An application that answers in two parts, the second after `end`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await end.wait()
        await send({"type": "http.response.body", "body": b"half"})

    return app


async def test_open_connections_end_with_their_answer_and_new_ones_are_refused() -> None:
    end, leaves = asyncio.Event(), asyncio.Event()
    listener = bind_http("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with (
        asyncio.timeout(LIMIT_S),
        background(serve_http(streaming(end), listener, leaves=leaves)),
    ):
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", port)
        busy, busy_writer = await asyncio.open_connection("127.0.0.1", port)
        busy_writer.write(REQUEST)
        assert (await busy.readuntil(b"half")).startswith(b"HTTP/1.1 200")
        leaves.set()
        assert await idle.read() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        end.set()
        assert await busy.read() == b"half"
        for each in (idle_writer, busy_writer):
            each.close()

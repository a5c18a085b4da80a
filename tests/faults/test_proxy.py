"""The proxy carries connections, and fails them as told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tests.faults.proxy import Link, Proxy, proxying
from tests.reach import until

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def target() -> AsyncIterator[str]:
    """Address of a server that echoes."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(100):
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    yield "127.0.0.1:{}".format(server.sockets[0].getsockname()[1])  # noqa: UP032 - nested quotes
    server.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with proxying() as running:
        yield running


async def ask(proxy: Proxy, target: str) -> Stream:
    """Asks the proxy for a connection."""
    host, _, port = proxy.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    return reader, writer


async def connect(proxy: Proxy, target: str) -> Stream:
    reader, writer = await ask(proxy, target)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    return reader, writer


async def echoes(stream: Stream) -> bool:
    reader, writer = stream
    writer.write(b"x")
    return await reader.read(1) == b"x"


async def ends_with_nothing(stream: Stream) -> None:
    with suppress(ConnectionResetError):
        assert await stream[0].read() == b""


async def stays_silent(stream: Stream) -> bool:
    """Whether an answer that could come at once does not. A slow machine cannot make this false."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream[0].read(1), 0.05)
    return True


async def test_proxy_carries_bytes_until_an_end_closes(proxy: Proxy, target: str) -> None:
    reader, writer = stream = await connect(proxy, target)
    assert await echoes(stream)
    writer.write(b"a" * 300_000)
    assert await reader.readexactly(300_000) == b"a" * 300_000
    writer.close()
    assert await reader.read() == b""


async def test_target_that_does_not_listen_is_refused(proxy: Proxy) -> None:
    reader, _ = await ask(proxy, "127.0.0.1:1")
    assert (await reader.read()).startswith(b"HTTP/1.1 502 ")


async def test_reset_ends_connections_of_its_target_only(proxy: Proxy, target: str) -> None:
    stream = await connect(proxy, target)
    assert await echoes(stream)
    proxy.links["another:1"].reset()
    assert await echoes(stream)
    proxy.links[target].reset()
    await ends_with_nothing(stream)
    assert await echoes(await connect(proxy, target))


async def test_closed_link_delays_bytes_and_connections(proxy: Proxy, target: str) -> None:
    stream, link = await connect(proxy, target), proxy.links[target]
    link.close()
    stream[1].write(b"x")
    waiting = await ask(proxy, target)
    assert await stays_silent(stream)
    assert await stays_silent(waiting)
    link.open()
    assert await stream[0].read(1) == b"x"
    assert (await waiting[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_reset_of_a_closed_link_loses_what_it_held(proxy: Proxy, target: str) -> None:
    stream, link = await connect(proxy, target), proxy.links[target]
    link.close()
    stream[1].write(b"x")
    waiting = await ask(proxy, target)
    assert await stays_silent(stream)
    link.reset()
    link.open()
    await ends_with_nothing(stream)
    await ends_with_nothing(waiting)


async def test_half_open_link_delivers_in_one_direction(proxy: Proxy, target: str) -> None:
    stream, link = await connect(proxy, target), proxy.links[target]
    link.answers.close()
    stream[1].write(b"x")
    assert await stays_silent(stream)
    link.answers.open()
    assert await stream[0].read(1) == b"x"


async def test_jitter_keeps_the_order_within_a_connection(proxy: Proxy, target: str) -> None:
    reader, writer = await connect(proxy, target)
    proxy.links[target].jitter_s = 0.01
    for number in range(20):
        writer.write(bytes([number]))
        await asyncio.sleep(0)
    assert await reader.readexactly(20) == bytes(range(20))


async def test_link_forgets_ended_connections(proxy: Proxy, target: str) -> None:
    _, writer = stream = await connect(proxy, target)
    assert await echoes(stream)
    link: Link = proxy.links[target]
    assert link.connections == 1
    writer.close()
    await until(lambda: link.connections == 0)

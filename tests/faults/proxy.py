"""A proxy that carries every gRPC connection between the processes of a system, and fails it.

gRPC connects as it does through an HTTP proxy, if the environment has `grpc_proxy`: a connection
begins with `CONNECT host:port`. So one proxy carries all of them, and knows the target of each.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

READ_BYTES = 2**16
ACCEPTED = b"HTTP/1.1 200 Connection established\r\n\r\n"
FAILED = b"HTTP/1.1 502 Bad Gateway\r\n\r\n"


class Gate:
    """Lets bytes of one direction pass while it is open."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def wait(self) -> None:
        await self._open.wait()


class Link:
    """All connections to one target. `requests` are the bytes to it, `answers` those from it."""

    def __init__(self) -> None:
        self.requests, self.answers = Gate(), Gate()
        self.jitter_s = 0.0  # the longest that a read of bytes is held back
        self._chance = Random(0)
        self._ends: set[asyncio.StreamWriter] = set()

    @property
    def connections(self) -> int:
        """Connections that are carried."""
        return len(self._ends) // 2

    def close(self) -> None:
        """Nothing passes. New connections wait, too."""
        self.requests.close()
        self.answers.close()

    def open(self) -> None:
        self.requests.open()
        self.answers.open()

    def reset(self) -> None:
        """Aborts the connections that there are. What is on its way is lost."""
        for end in self._ends:
            end.transport.abort()

    async def carry(
        self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter, host: str, port: int
    ) -> None:
        """Carries one connection until an end of it closes."""
        self._ends.add(to_client)
        try:
            await self.requests.wait()
            try:
                server, to_server = await asyncio.open_connection(host, port)
            except OSError:
                to_client.write(FAILED)
                return
            self._ends.add(to_server)
            try:
                to_client.write(ACCEPTED)
                await self._pump_both(client, to_client, server, to_server)
            finally:
                self._ends.discard(to_server)
                to_server.close()
        finally:
            self._ends.discard(to_client)

    async def _pump_both(
        self,
        client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        pumps = [
            asyncio.ensure_future(self._pump(client, to_server, self.requests)),
            asyncio.ensure_future(self._pump(server, to_client, self.answers)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, gate: Gate
    ) -> None:
        """Copies bytes until either side closes. O(READ_BYTES) are held back by a closed gate."""
        with suppress(OSError):
            while data := await source.read(READ_BYTES):
                if self.jitter_s:
                    await asyncio.sleep(self._chance.uniform(0.0, self.jitter_s))
                await gate.wait()
                target.write(data)
                await target.drain()


class Proxy:
    """The links by target, `host:port`. `url` is for the environment of the processes."""

    def __init__(self) -> None:
        self.url = ""
        self.links: defaultdict[str, Link] = defaultdict(Link)

    async def accept(self, client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                head = await client.readuntil(b"\r\n\r\n")
                method, target, _ = head.split(b"\r\n")[0].decode().split()
                assert method == "CONNECT", head
                host, _, port = target.rpartition(":")
                await self.links[target].carry(client, writer, host, int(port))
        finally:
            writer.close()


@asynccontextmanager
async def proxying() -> AsyncIterator[Proxy]:
    """A proxy on a free port while the block runs. Afterwards its connections are reset."""
    proxy, tasks = Proxy(), set[asyncio.Task[None]]()

    def accept(client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(proxy.accept(client, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield proxy
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""Channels to a servicer, over a socket and in process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from services.runtime.errors import OnInvalid
from services.runtime.network.channel import InProcessServer, connect
from services.runtime.server import Mount, listening

WAYS = ("socket", "in-process")


@asynccontextmanager
async def reaching(
    way: str,
    name: str,
    add: Callable[[Any, Any], None],
    servicer: object,
    on_invalid: OnInvalid | None = None,
) -> AsyncIterator[aio.Channel]:
    """A channel to the servicer, served under its full name `name`."""
    if way == "in-process":
        server = InProcessServer()
        add(servicer, server)
        yield server.channel()
        return
    async with listening(
        [Mount(name, add, servicer, on_invalid=on_invalid)], "127.0.0.1:0"
    ) as live:
        channel = connect(f"127.0.0.1:{live.port}")
        try:
            yield channel
        finally:
            await channel.close()


async def until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    """Polls until the condition is true. Raises TimeoutError after the limit."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.005)

"""Clients of Redis that connect on demand, and calls with a time limit. Importing takes 0.15 s."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar, cast
from urllib.parse import urlsplit

from redis.asyncio import Connection, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

T = TypeVar("T")

CONNECT_TIMEOUT_S = 1.0  # Redis is in the same network


class RedisUnavailable(Exception):
    """A call was not answered. A sentence that names what was called and the cause."""


def open_client(url: str, setting: str) -> tuple[Redis, str]:
    """A client that connects on demand, and its address without the password. Raises ValueError
    with a sentence about `setting`, the key that has the URL."""
    try:
        client = Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),  # a connection lost while idle is not an outage
        )
        pool = client.connection_pool
        # `ask` bounds the calls. With socket_timeout the client would write under asyncio.wait_for,
        # which may lose a cancellation before Python 3.12.
        pool.connection_kwargs["socket_timeout"] = None
        # Not connected; creating it raises TypeError for unknown options.
        connection = cast(Connection, pool.connection_class(**pool.connection_kwargs))
        connection.host.encode("idna")
        return (
            client,
            f"{urlsplit(url).scheme}://{connection.host}:{connection.port}/{connection.db}",
        )
    except (ValueError, TypeError, AttributeError):
        # Without the cause, which may contain the URL with the password.
        raise ValueError(
            f"{setting} is not of the form redis[s]://[user:password@]host[:port][/database]; "
            "encode / # ? @ in a password as %2F %23 %3F %40"
        ) from None


async def ask(command: Awaitable[T], what: str, limit_s: float) -> T:
    """The answer to a command about `what`. Raises RedisUnavailable without one in time."""
    try:
        async with asyncio.timeout(limit_s):
            return await command
    except TimeoutError as error:
        raise RedisUnavailable(f"{what} did not answer within {limit_s:g} s") from error
    except (RedisError, OSError) as error:
        raise RedisUnavailable(f"{what} cannot be used: {error}") from error

"""The deadline of a request that has no call yet: it is being read, or waits to be."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

from gateway.types.generation import RequestArrival
from services.runtime.errors import Code, ServiceError


@asynccontextmanager
async def within_deadline(arrival: RequestArrival) -> AsyncIterator[None]:
    """Ends what the block awaits at the request's deadline. Raises ServiceError then."""
    left_s = arrival.deadline_s - time.monotonic()
    timer = asyncio.timeout(left_s if left_s < inf else None)
    try:
        async with timer:
            yield
    except TimeoutError:
        if not timer.expired():  # a timeout of something in the block
            raise
        message = "the deadline passes before the request is read"
        raise ServiceError(Code.DEADLINE_EXCEEDED, message) from None

"""The deadline of a request that is being read."""

import asyncio
import time

import pytest

from gateway.admission.deadline import within_deadline
from gateway.types.generation import RequestArrival
from services.runtime.errors import Code, ServiceError


async def test_the_deadline_ends_what_the_block_awaits() -> None:
    with pytest.raises(ServiceError) as caught:
        async with within_deadline(RequestArrival(time.monotonic(), 0.01)):
            await asyncio.sleep(60)
    assert caught.value.code is Code.DEADLINE_EXCEEDED


@pytest.mark.parametrize("arrival", [RequestArrival(0.0), RequestArrival(time.monotonic(), 600.0)])
async def test_another_timeout_in_the_block_stays_what_it_is(arrival: RequestArrival) -> None:
    with pytest.raises(TimeoutError, match="of the body"):
        async with within_deadline(arrival):
            raise TimeoutError("of the body")

"""What tests of a gateway between fakes share: the house, a client in it and an answer."""

from collections.abc import AsyncIterator

import pytest

from foretoken import AsyncClient
from protos.generated import common_pb2 as common
from tests.gateway.gateway_fakes import House, demo_text, housing

STOP, LENGTH = common.FINISH_REASON_STOP, common.FINISH_REASON_LENGTH
WORDS = "one two three four five"
IDS = demo_text().encode(WORDS)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """A gateway whose worker says nothing of itself: the test sends the tokens."""
    async with housing() as made:
        yield made


@pytest.fixture
async def client(house: House) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(house.grpc_address) as made:
        yield made


async def first_prompt(house: House) -> str:
    """The id of the first request, once its prompt is at the worker."""
    await house.until(lambda: bool(house.worker.prompts))
    return house.worker.prompts[0].request_id

"""Fixtures of a gateway between fakes: the harness, a client and an answer."""

from collections.abc import AsyncIterator

import pytest

from foretoken import AsyncClient
from protos.generated import common_pb2 as common
from tests.gateway.gateway_fakes import Harness, demo_text, run_harness

STOP, LENGTH = common.FINISH_REASON_STOP, common.FINISH_REASON_LENGTH
WORDS = "one two three four five"
IDS = demo_text().encode(WORDS)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """A gateway with a worker without a script: the test sends the tokens."""
    async with run_harness() as made:
        yield made


@pytest.fixture
async def client(harness: Harness) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(harness.grpc_address) as made:
        yield made


async def first_prompt(harness: Harness) -> str:
    """The id of the first request, once the worker has its prompt."""
    await harness.until(lambda: bool(harness.worker.prompts))
    return harness.worker.prompts[0].request_id

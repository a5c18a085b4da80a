"""A server with the demo model, one for each module of tests, and OpenAI's client of it."""

from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI

from tests.live import Live, serving


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving() as system:
        yield system


@pytest.fixture
async def client(live: Live) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{live.http}/v1", api_key="none", max_retries=0) as made:
        yield made

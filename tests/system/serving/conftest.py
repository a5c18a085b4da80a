"""A server with the demo model, one for each module of tests, and OpenAI's client of it."""

from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI

from tests.live import Live, serving


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving() as system:
        yield system


@pytest.fixture
def client(live: Live) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{live.http}/v1", api_key="none", max_retries=0)

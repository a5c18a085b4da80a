"""The recorded requests of third-party clients (`sent/`) are accepted. Record them again after a
version changes: `rm tests/clients/sent/*.json; CLIENTS_RECORD=1 make test-clients`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.clients.recorder import Requests, Sent, load
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of

FILES = sorted((Path(__file__).parent / "sent").glob("*.json"))
ANSWER = tokens_of("fine")


@pytest.fixture
async def house() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: ANSWER) as made:
        yield made


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
async def test_recorded_client_requests_are_accepted(house: Harness, file: Path) -> None:
    posted = [each for each in load(file) if each.method == "POST"]
    assert posted
    for sent in posted:
        reply = await house.http("POST", sent.path, sent.body)
        assert reply.status == 200, (sent, reply)


def test_every_client_has_a_recorded_request() -> None:
    assert {file.stem for file in FILES} >= {
        *(
            "anthropic_python",
            "openai_python",
            "openai_node",
            "langchain",
            "llamaindex",
            "litellm",
            "agents",
            "ai_sdk",
            "aisuite",
        ),
        *("guidellm", "aiperf", "vllm_bench", "locust", "lm_eval"),
    }


def test_recorder_parses_requests_at_any_split() -> None:
    sent = (
        b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 14\r\n\r\n{"prompt":"a"}'
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
    )
    for size in (1, 7, len(sent)):
        kept: list[Sent] = []
        reader = Requests(kept)
        for start in range(0, len(sent), size):
            reader.feed(sent[start : start + size])
        assert kept == [Sent("POST", "/v1/completions", {"prompt": "a"}), Sent("GET", "/v1/models")]

"""Scores of the tokens of a response's text."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from gateway.faces.http.answers.items import AnswerItems, ItemKind
from gateway.faces.http.answers.scores import TokenScores
from gateway.sessions.session import ChoiceChunk
from gateway.types.generation import Sampling
from protos.generated import common_pb2 as common
from services.core import FinishReason
from tests.gateway.gateway_fakes import Harness, demo_text, run_harness, tokens_of
from tests.gateway.readers.answers import ANSWERS, USE, formats, open_reader

SCORES: Any = ["message.output_text.logprobs"]
WORDS = "one é three"
VERBATIM = Sampling(seed=0, max_tokens=1, skip_special_tokens=False)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: tokens_of(WORDS)) as made:
        yield made


@pytest.fixture
async def client(harness: Harness) -> AsyncIterator[Any]:
    async with AsyncOpenAI(base_url=f"{harness.http_url}/v1", api_key="none") as made:
        yield made


def chunks_of(text: str, step: int) -> list[ChoiceChunk]:
    """An answer in chunks of `step` tokens."""
    ids, detokenizer = tokens_of(text), demo_text().detokenizer(VERBATIM)
    chunks = []
    for at in range(0, len(ids), step):
        new = ids[at : at + step]
        scores = [common.TokenLogprob(token_id=token) for token in new]
        chunks.append(ChoiceChunk(0, detokenizer.feed(new), new, scores))
    chunks[-1].reason = FinishReason.STOP
    return chunks


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_content_has_the_scores_of_its_own_tokens(
    name: str, text: str, content: str, calls: object
) -> None:
    for step in (1, 3, 10_000):
        scores = TokenScores(demo_text().detokenizer(VERBATIM))
        items = AnswerItems(open_reader(formats(name), USE, ""), scores)
        for chunk in chunks_of(text, step):
            items.read([chunk])
        said = [item for item in items.items if item.kind is ItemKind.CONTENT]
        assert "".join(item.text for item in said) == content
        for item in said:
            scored = [score.token_id for score in item.scores]
            assert demo_text().decode(scored, False) == item.text


async def test_response_tells_the_scores_that_a_chat_tells(client: Any) -> None:
    chat = await client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "1,"}], logprobs=True, top_logprobs=2
    )
    expected = [entry.to_dict() for entry in chat.choices[0].logprobs.content]
    asked: Any = {"input": "1,", "include": SCORES, "top_logprobs": 2}
    response = await client.responses.create(**asked)
    assert response.top_logprobs == 2
    (part,) = response.output[0].content
    assert [entry.to_dict() for entry in part.logprobs] == expected
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.to_dict() for event in deltas for entry in event.logprobs] == expected
    for event in deltas:
        spelled = b"".join(bytes(entry.to_dict()["bytes"]) for entry in event.logprobs)
        assert spelled.decode() == event.delta
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [entry.to_dict() for entry in done.logprobs] == expected
    assert events[-1].response.output[0].content[0].logprobs == part.logprobs


async def test_tokens_of_a_stop_string_are_not_told(client: Any) -> None:
    response = await client.responses.create(
        input="1,", include=SCORES, extra_body={"stop": ["th"]}
    )
    (part,) = response.output[0].content
    assert part.text == "one é "
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == part.text
    assert not part.logprobs[0].top_logprobs

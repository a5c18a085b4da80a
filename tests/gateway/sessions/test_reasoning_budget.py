"""The budget of reasoning: hand-worked cuts, and an answer that goes on behind the end mark."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.sessions.reasoning_budget import ReasoningBudget
from gateway.types.generation import ReasoningLimit
from protos.generated.worker_pb2 import Prompt
from tests.gateway.gateway_fakes import Harness, demo_text, run_harness, tokens_of
from tests.gateway.requests.test_bad_http_input import CHAT

END = tokens_of("</t>")
TEMPLATE = "{# <think> #}{% for m in messages %}{{ m.content }}{% endfor %}"
THOUGHT = tokens_of("<think>" + "so " * 20)
BEHIND = tokens_of("Hi")


def budget(tokens: int, opened: bool) -> ReasoningBudget:
    limit = ReasoningLimit(tokens, "<t>", "</t>", END, opened)
    return ReasoningBudget(limit, demo_text().detokenizer())


@pytest.mark.parametrize(
    ("tokens", "opened", "pieces", "kept"),
    [
        (3, True, ["ab", "cd"], [None, "c"]),
        (3, True, ["abcd"], ["abc"]),
        (3, True, ["ab"], [None]),
        (4, False, ["<t>", "ab"], [None, "a"]),
        (4, False, ["abcdef"], [None]),
        (6, True, ["a</t>", "bcd"], [None, None]),
        (5, True, ["a</t>bcd"], [None]),
    ],
)
def test_reasoning_is_cut_at_its_budget(tokens, opened, pieces, kept):
    watched = budget(tokens, opened)
    for piece, expected in zip(pieces, kept, strict=True):
        cut = watched.cut(tokens_of(piece))
        assert cut == (None if expected is None else [*tokens_of(expected), *END])


def answer(prompt: Prompt) -> list[int]:
    """Thinks without end; behind an end mark that was forced, the content."""
    done = list(prompt.token_ids)[prompt.prompt_tokens :]
    return [*done, *BEHIND] if done else THOUGHT


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    async with run_harness(answer, chat_template=str(template)) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_goes_on_behind_its_cut_reasoning(harness: Harness, stream: bool):
    fields: dict[str, Any] = {"thinking_token_budget": 6, "stream": stream}
    reply = await harness.http("POST", "/v1/chat/completions", {**CHAT, **fields})
    assert reply.status == 200, reply.text
    if stream:
        deltas = [event["choices"][0]["delta"] for event in reply.events]
        message = {
            name: "".join(delta.get(name, "") for delta in deltas)
            for name in ("content", "reasoning")
        }
    else:
        message = reply.json["choices"][0]["message"]
    assert message["content"] == "Hi"
    assert "so so ".startswith(message["reasoning"]) and len(message["reasoning"]) > 2
    assert len(harness.worker.prompts) == 2


async def test_answer_within_the_budget_is_not_cut(harness: Harness):
    body = {**CHAT, "thinking_token_budget": 500, "max_tokens": 40}
    reply = await harness.http("POST", "/v1/chat/completions", body)
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert len(harness.worker.prompts) == 1


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"thinking_token_budget": -2}, "must be at least 0, or -1"),
        ({"thinking_token_budget": "x"}, "integer"),
        ({"thinking_token_budget": 5, "separate_reasoning": False}, "needs separate_reasoning"),
    ],
)
async def test_mistake_names_the_field(harness: Harness, fields: dict[str, Any], part: str):
    error = (await harness.http("POST", "/v1/chat/completions", {**CHAT, **fields})).json["error"]
    assert error["param"] == "thinking_token_budget"
    assert part in error["message"]

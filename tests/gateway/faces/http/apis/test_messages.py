"""`/v1/messages` on the wire: whole and streamed messages, token counts, and errors."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protos.generated import common_pb2 as common
from tests.gateway.gateway_fakes import Harness, Reply, demo_text, run_harness, tokens_of
from tests.gateway.gateway_fixtures import first_prompt

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
WORDS = "one two three"
USER = {"role": "user", "content": "1,"}
TOOL = {"name": "f", "input_schema": {}}
BASE: dict[str, Any] = {"model": "demo", "max_tokens": 32, "messages": [USER]}


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: tokens_of(WORDS)) as made:
        made.worker.cached_tokens = 2
        yield made


def read_events(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream, each under the name of its type."""
    events = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def prompt_of(harness: Harness) -> str:
    return demo_text().decode(list(harness.worker.prompts[-1].token_ids), False)


async def test_whole_message_has_blocks_stop_reason_and_usage(harness: Harness) -> None:
    message = (await harness.http("POST", f"{PATH}?beta=true", BASE)).json
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": WORDS}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": len(WORDS),
        },
    }


async def test_streamed_message_has_the_documented_events(harness: Harness) -> None:
    events = read_events(await harness.http("POST", PATH, {**BASE, "stream": True}))
    kinds = [event["type"] for event in events]
    head = ["message_start", "ping", "content_block_start", "content_block_delta"]
    assert kinds[:4] == head
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert {*kinds[3:-3]} == {"content_block_delta"}
    start = events[0]["message"]
    assert (start["role"], start["content"], start["stop_reason"]) == ("assistant", [], None)
    assert start["usage"]["cache_read_input_tokens"] == 2
    assert events[2]["content_block"] == {"type": "text", "text": ""}
    deltas = [event["delta"] for event in events[3:-3]]
    assert {delta["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["text"] for delta in deltas) == WORDS
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(WORDS)


@pytest.mark.parametrize(
    ("fields", "stop", "text"),
    [
        ({"max_tokens": 5}, ("max_tokens", None), WORDS[:5]),
        ({"stop_sequences": ["x", "two"]}, ("stop_sequence", "two"), "one "),
        ({"stop_sequences": ["e t"]}, ("stop_sequence", "e t"), "on"),
    ],
)
async def test_stop_reason_tells_limits_and_stop_sequences(
    harness: Harness, fields: dict[str, Any], stop: tuple[str, str | None], text: str
) -> None:
    message = (await harness.http("POST", PATH, {**BASE, **fields})).json
    assert (message["stop_reason"], message["stop_sequence"]) == stop
    assert message["content"][0]["text"] == text
    events = read_events(await harness.http("POST", PATH, {**BASE, **fields, "stream": True}))
    delta = next(event for event in events if event["type"] == "message_delta")["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == stop


async def test_system_and_blocks_reach_the_prompt(harness: Harness) -> None:
    blocks = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"}
    body = {
        **BASE,
        "system": [header, {"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": blocks},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "user", "content": "d"},
        ],
    }
    assert (await harness.http("POST", PATH, body)).status == 200
    turns = "<|user|>a\nb<|end|><|assistant|>c<|end|><|user|>d<|end|><|assistant|>"
    assert prompt_of(harness) == f"<|system|>Be brief.<|end|>{turns}"
    counted = (await harness.http("POST", COUNT, body)).json
    assert counted == {"input_tokens": len(harness.worker.prompts[-1].token_ids)}


async def test_answer_continues_a_last_assistant_message(harness: Harness) -> None:
    body = {**BASE, "messages": [USER, {"role": "assistant", "content": "on"}]}
    assert (await harness.http("POST", PATH, body)).status == 200
    assert prompt_of(harness) == "<|user|>1,<|end|><|assistant|>on"


async def test_headers_and_extra_fields_are_those_of_a_chat(harness: Harness) -> None:
    headers = {"x-foretoken-sla": "interactive", "anthropic-version": "2023-06-01"}
    body = {**BASE, "metadata": {"user_id": "u1"}, "top_k": 5, "seed": 7, "wish": 1}
    reply = await harness.http("POST", PATH, body, headers)
    assert reply.headers["x-foretoken-ignored-fields"] == "wish"
    sampling = harness.worker.prompts[-1].sampling
    assert (sampling.top_k, sampling.seed) == (5, 7)
    assert harness.scheduler.requests[-1].sla.name == "interactive"
    assert harness.scheduler.requests[-1].tenant == "u1"


async def test_models_have_the_fields_that_anthropic_s_clients_read(harness: Harness) -> None:
    version = {"anthropic-version": "2023-06-01"}
    listed = (await harness.http("GET", "/v1/models", None, version)).json
    (card,) = listed["data"]
    assert (card["type"], card["display_name"], card["lifecycle"]) == ("model", "demo", "active")
    assert (listed["first_id"], listed["has_more"]) == ("demo", False)
    assert (await harness.http("GET", "/v1/models/demo", None, version)).json == card
    plain = (await harness.http("GET", "/v1/models/demo")).json
    assert plain.items() < card.items() and "type" not in plain


async def test_output_format_constrains_the_answer(harness: Harness) -> None:
    output = {"type": "json_schema", "schema": {"type": "object"}}
    await harness.http("POST", PATH, {**BASE, "output_config": {"format": output}})
    assert harness.worker.prompts[-1].sampling.grammar


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: is missing"),
    ({"max_tokens": 0}, "max_tokens: must be at least 1"),
    ({"max_tokens": 10_000}, "This model's maximum context length is 512 tokens"),
    ({"messages": []}, "messages: must not be empty"),
    ({"messages": "hi"}, "messages: input should be a valid list"),
    ({"messages": ["hi"]}, "messages[0]: must be an object"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role: must be one of user"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: must be a string or a list"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text: is miss"),
    (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
        "messages[1].content[0].input: must be an object",
    ),
    ({"system": 7}, "system: must be a string or a list of text blocks"),
    ({"stop_sequences": "x"}, "stop_sequences: input should be a valid list"),
    ({"thinking": {"type": "deep"}}, "thinking.type: must be one of enabled"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        "thinking.budget_tokens: must be at least 1, not 0",
    ),
    ({"output_config": {"effort": "huge"}}, "output_config.effort: must be one of low"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema: is missing"),
    ({"metadata": {"user_id": 7}}, "metadata.user_id: must be a string"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: is not supported"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: is missing"),
    ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name: must be 1 to 256 letters"),
    (
        {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
        "tools[0].input_schema.type: must be 'object'",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: only tools with"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
    ({"tool_choice": "auto"}, "tool_choice.type: must be one of auto, any, none, tool"),
    (
        {
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "tool", "name": "g"},
        },
        "tool_choice.name: 'g' is not one of the tools: f",
    ),
    ({"temperature": 3}, "temperature: must be between 0 and 2"),
    ({"top_p": "1"}, "top_p: input should be a valid number"),
]


async def test_bad_body_is_named_in_anthropic_s_shape(harness: Harness) -> None:
    for fields, sentence in BAD:
        reply = await harness.http("POST", PATH, {**BASE, **fields})
        assert reply.status == 400, fields
        assert reply.json["type"] == "error" and reply.json["error"].keys() == {"type", "message"}
        assert reply.json["request_id"] == reply.headers["request-id"]
        assert reply.json["error"]["type"] == "invalid_request_error"
        assert sentence in reply.json["error"]["message"], (fields, reply.text)


async def test_other_errors_have_anthropic_s_types(harness: Harness) -> None:
    for method, path, body, status, kind in (
        ("POST", PATH, {**BASE, "model": "none"}, 404, "not_found_error"),
        ("POST", COUNT, {**BASE, "model": "none"}, 404, "not_found_error"),
        ("POST", PATH, b"{", 400, "invalid_request_error"),
        ("POST", f"{PATH}/batches", {}, 404, "not_found_error"),
        ("GET", PATH, None, 405, "invalid_request_error"),
    ):
        reply = await harness.http(method, path, body)
        error = reply.json["error"]
        assert (reply.status, reply.json["type"], error["type"]) == (status, "error", kind)


async def test_key_of_x_api_key_is_accepted() -> None:
    async with run_harness(lambda _: tokens_of(WORDS), api_keys=("k" * 20,)) as harness:
        assert (await harness.http("POST", PATH, BASE, {"x-api-key": "k" * 20})).status == 200
        for headers in ({}, {"x-api-key": "wrong"}):
            reply = await harness.http("POST", PATH, BASE, headers)
            kind = reply.json["error"]["type"]
            assert (reply.status, kind) == (401, "authentication_error")


async def test_refusal_under_load_is_a_rate_limit_error() -> None:
    async with run_harness(lambda _: tokens_of(WORDS), queue=(9, 60.0), max_queued=9) as harness:
        reply = await harness.http("POST", PATH, BASE)
        assert (reply.status, reply.json["error"]["type"]) == (429, "rate_limit_error")
        assert int(reply.headers["retry-after"]) > 0


async def test_failure_within_a_stream_is_an_error_event() -> None:
    async with run_harness() as harness:
        asking = asyncio.ensure_future(harness.http("POST", PATH, {**BASE, "stream": True}))
        name = await first_prompt(harness)
        harness.worker.send(name, 0, tokens_of("on"))
        await asyncio.sleep(0.2)  # the failure comes behind the first events
        harness.worker.send(name, 2, (), common.FINISH_REASON_ERROR, "out of luck")
        reply = await asking
    told = {"type": "api_error", "message": "out of luck"}
    error = {"type": "error", "error": told, "request_id": reply.headers["request-id"]}
    assert (reply.status, read_events(reply)[-1]) == (200, error)


async def test_long_wait_sends_pings_and_then_errors_are_events() -> None:
    async with run_harness(stream_ping_s=0.05) as harness:
        asking = asyncio.ensure_future(harness.http("POST", PATH, {**BASE, "stream": True}))
        name = await first_prompt(harness)
        await asyncio.sleep(0.2)
        harness.worker.send(name, 0, tokens_of(WORDS), common.FINISH_REASON_STOP)
        kinds = [event["type"] for event in read_events(await asking)]
        start = kinds.index("message_start")
        assert start > 0 and {*kinds[:start]} == {"ping"} and kinds[-1] == "message_stop"
        asking = asyncio.ensure_future(harness.http("POST", PATH, {**BASE, "stream": True}))
        await harness.until(lambda: len(harness.worker.prompts) == 2)
        await asyncio.sleep(0.2)
        name = harness.worker.prompts[1].request_id
        harness.worker.send(name, 0, (), common.FINISH_REASON_ERROR, "out of luck")
        reply = await asking
        kinds = [event["type"] for event in read_events(reply)]
        assert (reply.status, kinds[0], kinds[-1]) == (200, "ping", "error")
        chat = {"messages": [USER], "stream": True}
        asking = asyncio.ensure_future(harness.http("POST", "/v1/chat/completions", chat))
        await harness.until(lambda: len(harness.worker.prompts) == 3)
        await asyncio.sleep(0.2)
        name = harness.worker.prompts[2].request_id
        harness.worker.send(name, 0, tokens_of(WORDS), common.FINISH_REASON_STOP)
        reply = await asking
        assert reply.text.startswith(": ping\n\n")
        assert (
            "".join(each["choices"][0]["delta"].get("content", "") for each in reply.events)
            == WORDS
        )


async def test_thinking_budget_limits_reasoning_that_has_marks() -> None:
    thinking = {"type": "enabled", "budget_tokens": 4}
    thought = "<think>one two three four</think>five"
    async with run_harness(lambda _: tokens_of(thought), reasoning_parser="qwen3") as harness:
        message = (await harness.http("POST", PATH, {**BASE, "thinking": thinking})).json
        assert len(message["content"][0]["thinking"]) < 8, message
    async with run_harness(lambda _: tokens_of(WORDS), reasoning_parser="none") as harness:
        body = {**BASE, "thinking": thinking}
        assert (await harness.http("POST", PATH, body)).json["content"][0]["text"] == WORDS
        reply = await harness.http("POST", PATH, {**BASE, "thinking_token_budget": 4})
        assert "thinking_token_budget" in reply.json["error"]["message"]

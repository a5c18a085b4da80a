"""Reasoning and tool calls in responses and messages, complete and streamed."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.faces.http.apis.test_messages import prompt_of, read_events
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALLS = f"<think>Two.</think>{CALL}\n{CALL}"
MALFORMED = '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>'
RESPONSES: dict[str, Any] = {
    "input": "1,",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": "required",
}
MESSAGES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "1,"}],
    "max_tokens": 200,
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "any"},
}


TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}
{{- c.function.name }}({{ c.function.arguments.a }}){% endfor %}{{ m.tool_call_id or "" }};
{%- endfor %}answer:"""


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    settings: Any = {"reasoning_parser": "qwen3", "chat_template": str(template)}
    async with run_harness(lambda _: tokens_of(CALLS), **settings) as made:
        yield made


async def post(harness: Harness, path: str, body: object, **fields: object) -> Any:
    return await harness.http("POST", path, {**body, **fields})  # type: ignore[dict-item]  # a body


def signature(item: dict[str, Any]) -> tuple[object, ...]:
    match item["type"]:
        case "reasoning":
            return ("reasoning", item["content"][0]["text"])
        case "message":
            return ("message", item["content"][0]["text"])
        case _:
            return (item["type"], item["name"], item["arguments"])


async def test_response_has_reasoning_and_call_items(harness: Harness) -> None:
    response = (await post(harness, "/v1/responses", RESPONSES)).json
    call = ("function_call", "f", '{"a": 1}')
    assert [signature(item) for item in response["output"]] == [("reasoning", "Two."), call, call]
    assert {item["status"] for item in response["output"]} == {"completed"}
    first, second = response["output"][1:]
    assert first["call_id"] != second["call_id"] and first["id"] != second["id"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    events = read_events(await post(harness, "/v1/responses", RESPONSES, stream=True))
    assert [*dict.fromkeys(event["type"] for event in events)] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.reasoning_text.delta",
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.completed",
    ]  # fmt: skip
    streamed = events[-1]["response"]
    assert [*map(signature, streamed["output"])] == [*map(signature, response["output"])]
    for index, item in enumerate(streamed["output"]):
        deltas = [
            event["delta"]
            for event in events
            if event.get("output_index") == index and event["type"].endswith(".delta")
        ]
        assert "".join(deltas) == signature(item)[-1]
        done = [event["item"] for event in events if event["type"].endswith("item.done")]
        assert done[index] == item


async def test_message_has_thinking_and_tool_use_blocks(harness: Harness) -> None:
    message = (await post(harness, "/v1/messages", MESSAGES)).json
    thinking, first, second = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Two.", "signature": ""}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "f", {"a": 1})
    assert first["id"] != second["id"] and message["stop_reason"] == "tool_use"
    events = read_events(await post(harness, "/v1/messages", MESSAGES, stream=True))
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["index"] for start in starts] == [0, 1, 2]
    assert [start["content_block"]["type"] for start in starts] == [
        "thinking", "tool_use", "tool_use",
    ]  # fmt: skip
    pieces: dict[int, str] = {0: "", 1: "", 2: ""}
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            pieces[event["index"]] += delta.get("thinking") or delta.get("partial_json") or ""
    assert pieces[0] == "Two." and json.loads(pieces[1]) == json.loads(pieces[2]) == {"a": 1}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_results_of_tools_continue_the_conversation(harness: Harness) -> None:
    asked = (await post(harness, "/v1/responses", RESPONSES)).json
    result = {
        "type": "function_call_output",
        "call_id": asked["output"][1]["call_id"],
        "output": "42",
    }
    told = await post(
        harness, "/v1/responses", {"input": [result], "previous_response_id": asked["id"]}
    )
    called = "user: 1,;assistant: f(1)f(1);"
    assert (told.status, prompt_of(harness)) == (
        200,
        f"{called}tool: 42{result['call_id']};answer:",
    )
    said = (await post(harness, "/v1/messages", MESSAGES)).json["content"]
    results = [
        {"type": "tool_result", "tool_use_id": said[1]["id"], "content": "42"},
        {"type": "tool_result", "tool_use_id": said[2]["id"], "is_error": True,
         "content": [{"type": "text", "text": "no"}]},
        {"type": "text", "text": "Go on."},
    ]  # fmt: skip
    turns = [*MESSAGES["messages"], {"role": "assistant", "content": said}]
    body = {**MESSAGES, "messages": [*turns, {"role": "user", "content": results}]}
    assert (await post(harness, "/v1/messages", body)).status == 200
    told = f"tool: 42{said[1]['id']};tool: no{said[2]['id']};user: Go on.;answer:"
    assert prompt_of(harness) == f"{called}{told}"


async def test_call_that_a_limit_cuts_is_incomplete(harness: Harness) -> None:
    harness.worker.script = lambda _: tokens_of(CALL)
    limit = len(tokens_of(CALL[: CALL.index("1}")]))
    cut = (await post(harness, "/v1/responses", RESPONSES, max_output_tokens=limit)).json
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")
    assert cut["output"][0]["arguments"] == '{"a": '
    again = await post(harness, "/v1/responses", {"input": "2,", "previous_response_id": cut["id"]})
    assert again.status == 200, "the cut call is no part of the conversation"
    message = (await post(harness, "/v1/messages", MESSAGES, max_tokens=limit)).json
    assert message["stop_reason"] == "max_tokens" and message["content"][0]["input"] == {}


async def test_malformed_call_is_content(harness: Harness) -> None:
    harness.worker.script = lambda _: tokens_of(MALFORMED)
    response = (await post(harness, "/v1/responses", RESPONSES)).json
    assert [*map(signature, response["output"])] == [("message", MALFORMED)]
    events = read_events(await post(harness, "/v1/responses", RESPONSES, stream=True))
    last = events[-1]["response"]
    assert last["output"][-1]["content"][0]["text"] == MALFORMED
    stored = await post(
        harness, "/v1/responses", {"input": "2,", "previous_response_id": last["id"]}
    )
    assert stored.status == 200
    message = (await post(harness, "/v1/messages", MESSAGES)).json
    assert message["content"] == [{"type": "text", "text": MALFORMED}]
    assert message["stop_reason"] == "end_turn"
    events = read_events(await post(harness, "/v1/messages", MESSAGES, stream=True))
    assert events[-2]["delta"]["stop_reason"] == "end_turn"

"""`/v1/responses` with the official client: answers, typed events, what is stored or runs on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from protos.generated import common_pb2 as common
from tests.gateway.gateway_fakes import Harness, demo_text, run_harness, tokens_of
from tests.gateway.gateway_fixtures import first_prompt

WORDS = "one two three"
KEYS = ("a" * 20, "b" * 20)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: tokens_of(WORDS)) as made:
        made.worker.cached_tokens = 2
        yield made


def connect(harness: Harness, key: str = "none") -> Any:
    return AsyncOpenAI(base_url=f"{harness.http_url}/v1", api_key=key, max_retries=0)


@pytest.fixture
async def client(harness: Harness) -> AsyncIterator[Any]:
    async with connect(harness) as made:
        yield made


def prompt_of(harness: Harness) -> str:
    return demo_text().decode(list(harness.worker.prompts[-1].token_ids), False)


async def test_whole_response_tells_output_usage_and_settings(client: Any) -> None:
    response = await client.responses.create(
        model="demo", input="1,", temperature=0.5, metadata={"team": "a"}, user="me"
    )
    assert (response.object, response.status, response.model) == ("response", "completed", "demo")
    assert response.id.startswith("resp_") and response.completed_at >= response.created_at
    (item,) = response.output
    assert (item.type, item.status, item.role) == ("message", "completed", "assistant")
    assert response.output_text == WORDS
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert response.usage.output_tokens == len(WORDS)
    assert response.usage.total_tokens == response.usage.input_tokens + len(WORDS)
    assert (response.temperature, response.metadata) == (0.5, {"team": "a"})
    assert response.error is None and response.incomplete_details is None


async def test_streamed_response_has_the_typed_events_in_order(client: Any) -> None:
    events = [event async for event in await client.responses.create(input="1,", stream=True)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == WORDS == events[-4].text
    assert {event.item_id for event in deltas} == {events[-1].response.output[0].id}
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    async with client.responses.stream(input="1,", model="demo") as stream:
        final = await stream.get_final_response()
    assert final.output_text == WORDS


async def test_limit_makes_a_response_incomplete(client: Any) -> None:
    response = await client.responses.create(input="1,", max_output_tokens=3)
    assert (response.status, response.output_text) == ("incomplete", "one")
    assert response.incomplete_details.reason == "max_output_tokens"
    events = [
        event
        async for event in await client.responses.create(
            input="1,", max_output_tokens=3, stream=True
        )
    ]
    assert events[-1].type == "response.incomplete"


async def test_previous_response_continues_the_conversation(harness: Harness, client: Any) -> None:
    first = await client.responses.create(input="1,", instructions="Count.")
    second = await client.responses.create(input="2,", previous_response_id=first.id)
    said = f"<|user|>1,<|end|><|assistant|>{WORDS}<|end|><|user|>2,<|end|><|assistant|>"
    assert prompt_of(harness) == said, "instructions are not carried over"
    events = await client.responses.create(
        input="3,", previous_response_id=second.id, instructions="Again.", stream=True
    )
    last = [event async for event in events][-1].response
    turns = f"{said}{WORDS}<|end|><|user|>3,<|end|><|assistant|>"
    assert prompt_of(harness) == f"<|system|>Again.<|end|>{turns}"
    assert last.previous_response_id == second.id
    await client.responses.delete(second.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(input="4,", previous_response_id=second.id)
    assert caught.value.code == "previous_response_not_found"
    assert (await client.responses.retrieve(last.id)).output_text == WORDS


async def test_items_become_the_messages_of_the_template(harness: Harness, client: Any) -> None:
    items: Any = [
        {"role": "developer", "content": "Sort."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b a"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "a b", "annotations": []}]},
        {"role": "user", "content": "c"},
    ]  # fmt: skip
    await client.responses.create(input=items)
    turns = "<|user|>b a<|end|><|assistant|>a b<|end|><|user|>c<|end|><|assistant|>"
    assert prompt_of(harness) == f"<|system|>Sort.<|end|>{turns}"


async def test_response_that_is_not_stored_cannot_be_named(client: Any) -> None:
    response = await client.responses.create(input="1,", store=False)
    for name in (response.id, "resp_none", "x" * 500):
        with pytest.raises(openai.NotFoundError, match="not found"):
            await client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(name)
        with pytest.raises(openai.NotFoundError):
            await client.responses.cancel(name)


async def test_response_is_only_for_its_own_api_key() -> None:
    async with (
        run_harness(lambda _: tokens_of(WORDS), api_keys=KEYS) as harness,
        connect(harness, KEYS[0]) as owner,
        connect(harness, KEYS[1]) as other,
    ):
        response = await owner.responses.create(input="1,")
        assert (await owner.responses.retrieve(response.id)).id == response.id
        for call in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(response.id)
        with pytest.raises(openai.BadRequestError):
            await other.responses.create(input="2,", previous_response_id=response.id)
        assert await owner.responses.retrieve(response.id)


async def test_background_response_is_polled(harness: Harness, client: Any) -> None:
    harness.worker.script = None
    queued = await client.responses.create(input="1,", background=True)
    assert (queued.status, queued.background) == ("queued", True)
    await harness.until(lambda: bool(harness.worker.prompts))
    assert (await client.responses.retrieve(queued.id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="still runs"):
        await client.responses.create(input="2,", previous_response_id=queued.id)
    name = harness.worker.prompts[0].request_id
    harness.worker.send(name, 0, tokens_of("one"), common.FINISH_REASON_STOP)
    await harness.until(lambda: not harness.front.background.names)
    ended = await client.responses.retrieve(queued.id)
    assert (ended.status, ended.output_text) == ("completed", "one")
    assert (await client.responses.cancel(queued.id)).status == "completed"


@pytest.mark.parametrize("end", ["cancel", "delete"])
async def test_cancelled_background_response_stops_on_the_device(
    harness: Harness, client: Any, end: str
) -> None:
    harness.worker.script = None
    queued = await client.responses.create(input="1,", background=True)
    await harness.until(lambda: bool(harness.worker.prompts))
    await getattr(client.responses, end)(queued.id)
    await harness.until(lambda: bool(harness.scheduler.cancels))
    assert not harness.front.background.names and not harness.front.live
    if end == "cancel":
        assert (await client.responses.retrieve(queued.id)).status == "cancelled"
    else:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(queued.id)


@pytest.mark.parametrize("shared", [False, True])
async def test_background_responses_are_bounded(shared: bool, tmp_path: Path) -> None:
    file = str(tmp_path / "responses.db") if shared else ""
    running = run_harness(None, max_background=1, responses_file=file)
    async with running as harness, connect(harness) as client:
        first = await client.responses.create(input="1,", background=True)
        with pytest.raises(openai.RateLimitError, match="run in the background"):
            await client.responses.create(input="1,", background=True)
        await harness.until(lambda: harness.front.live == 1)
        await client.responses.cancel(first.id)
        assert (await client.responses.create(input="1,", background=True)).status == "queued"


async def test_only_background_responses_are_cancelled(client: Any) -> None:
    response = await client.responses.create(input="1,")
    with pytest.raises(openai.BadRequestError, match="only a response with background"):
        await client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError, match="stream: no events of it are kept"):
        await client.responses.retrieve(response.id, stream=True)


async def test_disconnected_client_ends_its_response(harness: Harness, client: Any) -> None:
    harness.worker.script = None
    asking = asyncio.ensure_future(client.responses.create(input="1,"))
    await harness.until(lambda: bool(harness.worker.prompts))
    asking.cancel()
    await harness.until(lambda: bool(harness.scheduler.cancels))


async def test_failure_within_a_stream_is_a_failed_response() -> None:
    async with run_harness() as harness, connect(harness) as client:
        stream = asyncio.ensure_future(client.responses.create(input="1,", stream=True))
        name = await first_prompt(harness)
        harness.worker.send(name, 0, tokens_of("on"))
        events = aiter(await stream)
        assert (await anext(events)).type == "response.created"
        harness.worker.send(name, 2, (), common.FINISH_REASON_ERROR, "out of luck")
        last = [event async for event in events][-1]
        assert (last.type, last.response.error.message) == ("response.failed", "out of luck")
        assert (await client.responses.retrieve(last.response.id)).status == "failed"


async def test_parsed_response_has_the_format_s_type(harness: Harness, client: Any) -> None:
    class Count(BaseModel):
        n: int

    harness.worker.script = lambda _: tokens_of('{"n": 7}')
    response = await client.responses.parse(model="demo", input="1,", text_format=Count)
    assert response.output_parsed == Count(n=7)
    assert harness.worker.prompts[-1].sampling.grammar


async def test_format_tools_and_extra_fields_reach_the_worker(
    harness: Harness, client: Any
) -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    await client.responses.create(input="1,", text={"format": schema}, extra_body={"top_k": 3})
    sampling = harness.worker.prompts[-1].sampling
    assert sampling.grammar and sampling.top_k == 3
    forced = await client.responses.create(input="1,", tools=[TOOL], tool_choice="required")
    assert harness.worker.prompts[-1].sampling.grammar
    assert forced.tools[0].name == "f" and forced.tool_choice == "required"


BAD: list[tuple[dict[str, Any], str, str]] = [
    # fields, the named field, part of the sentence
    ({"input": None}, "input", "is missing"),
    ({"input": 7}, "input", "must be a string or a list of items"),
    ({"input": []}, "input", "must not be empty"),
    ({"input": ["a"]}, "input[0]", "must be an object"),
    ({"input": [{"type": "image"}]}, "input[0].type", "must be one of message"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "must be one of user"),
    ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].type", "only text parts"),
    ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "["}]},
     "input[0].arguments", "must be the text of a JSON object"),
    ({"input": [{"type": "function_call_output", "output": "a"}]},
     "input[0].call_id", "is missing"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "previous_response_id"),
    ({"instructions": 7}, "instructions", "valid string"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"background": True, "store": False}, "store", "must be true with background"),
    ({"truncation": "left"}, "truncation", "'auto' or 'disabled'"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "at most 64 characters"),
    ({"metadata": {str(n): "v" for n in range(17)}}, "metadata", "at most 16 keys"),
    ({"include": ["logprobs"]}, "include[0]", "must be one of message.output_text.logprobs"),
    ({"top_logprobs": 2}, "top_logprobs", "needs include"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21},
     "top_logprobs", "between 0 and 20"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be one of text"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "missing"),
    ({"text": {"colour": "red"}}, "text.colour", "is not a field"),
    ({"reasoning": {"effort": 7}}, "reasoning.effort", "must be a string"),
    ({"conversation": "conv_1"}, "conversation", "is not supported"),
    ({"previous_response_id": 7}, "previous_response_id", "valid string"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only tools of type 'function'"),
    ({"tools": [{"type": "function", "name": "f g"}]}, "tools[0].name", "1 to 256 letters"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "another tool"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
     "tool_choice.name", "'g' is not one of the tools: f"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
     "tool_choice.mode", "must be auto or required"),
]  # fmt: skip


async def test_bad_body_names_the_field(harness: Harness) -> None:
    for fields, name, sentence in BAD:
        reply = await harness.http("POST", "/v1/responses", {"input": "1,", **fields})
        error = reply.json["error"]
        assert (reply.status, error["param"]) == (400, name), (fields, error)
        assert sentence in error["message"], (fields, error)
    assert not harness.worker.prompts

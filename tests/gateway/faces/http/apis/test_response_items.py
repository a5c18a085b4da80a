"""The input items of stored responses, their token counts, and calls that are refused by name."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.gateway.faces.http.apis.test_responses import WORDS, connect
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "7"}
PARTS = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
ITEMS: Any = [{"role": "user", "content": PARTS}, CALL, RESULT]


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: tokens_of(WORDS)) as made:
        yield made


@pytest.fixture
async def client(harness: Harness) -> AsyncIterator[Any]:
    async with connect(harness) as made:
        yield made


async def test_input_items_are_listed_in_pages(client: Any) -> None:
    response = await client.responses.create(input=ITEMS)
    listed = [item async for item in client.responses.input_items.list(response.id, limit=1)]
    assert [item.type for item in listed] == ["function_call_output", "function_call", "message"]
    page = await client.responses.input_items.list(response.id, order="asc")
    assert page.data == [*reversed(listed)] and not page.has_more
    message, call, result = page.data
    assert [part.text for part in message.content] == ["a", "b"]
    assert (call.name, call.call_id, result.output) == ("f", "c", "7")
    rest = await client.responses.input_items.list(response.id, after=call.id, order="asc")
    assert rest.data == [result]
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await client.responses.input_items.list(response.id)


async def test_input_items_include_the_conversation_so_far(client: Any) -> None:
    first = await client.responses.create(input="1,", include=["message.output_text.logprobs"])
    second = await client.responses.create(input="2,", previous_response_id=first.id)
    items = (await client.responses.input_items.list(second.id, order="asc")).data
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "1,"), ("assistant", WORDS), ("user", "2,"),
    ]  # fmt: skip
    assert items[1].id == first.output[0].id and not items[1].content[0].logprobs
    earlier = (await client.responses.input_items.list(first.id)).data
    assert earlier == items[:1], "an item keeps its id"


async def test_bad_pages_name_the_field(harness: Harness, client: Any) -> None:
    response = await client.responses.create(input="1,")
    for query, param, fault in (
        ("limit=0", "limit", "from 1 to 100"),
        ("limit=101", "limit", "from 1 to 100"),
        ("order=up", "order", "must be desc or asc"),
    ):
        reply = await harness.http("GET", f"/v1/responses/{response.id}/input_items?{query}")
        assert (reply.status, reply.json["error"]["param"]) == (400, param)
        assert fault in reply.json["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="No such object in this list"):
        await client.responses.input_items.list(response.id, after="msg_0")


async def test_input_tokens_are_those_that_a_response_reads(harness: Harness, client: Any) -> None:
    first = await client.responses.create(input="1,")
    asked: Any = {"input": ITEMS, "instructions": "Count.", "previous_response_id": first.id}
    prompts = len(harness.worker.prompts)
    counted = await client.responses.input_tokens.count(**asked, model="demo")
    assert counted.object == "response.input_tokens"
    assert len(harness.worker.prompts) == prompts
    assert counted.input_tokens == (await client.responses.create(**asked)).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="conversation: is not supported"):
        await client.responses.input_tokens.count(input="1,", conversation="conv_1")


async def test_calls_that_are_not_served_say_what_to_use(harness: Harness, client: Any) -> None:
    chat = client.chat.completions
    for refused in (
        chat.list(),
        chat.retrieve("chatcmpl-1"),
        chat.update("chatcmpl-1", metadata={}),
        chat.delete("chatcmpl-1"),
        chat.messages.list("chatcmpl-1"),
    ):
        with pytest.raises(openai.APIStatusError, match="chat completions are not stored"):
            await refused
    with pytest.raises(openai.APIStatusError, match="conversations are not compacted"):
        await client.responses.compact(model="demo", input="1,")
    for path in ("/v1/responses", "/v1/realtime"):
        upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        reply = await harness.http("GET", path, None, upgrade)
        assert "WebSockets and the Realtime API are not supported" in reply.text
    reply = await harness.http("POST", "/v1/messages/batches", {})
    assert reply.status == 404 and "start the server with --batch-folder" in reply.text

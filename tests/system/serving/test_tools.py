"""Tools of a live server with the demo model, by the openai client: forced calls follow their
schemas, at any temperature."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import validate
from openai import AsyncOpenAI, BadRequestError

from tests.live import Live, serving

pytestmark = pytest.mark.slow
MODEL = "demo"
CHAT: list[Any] = [{"role": "user", "content": "weather in Paris"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"], "additionalProperties": False}  # fmt: skip
SUM = {
    "type": "object",
    "properties": {"terms": {"type": "array", "items": {"type": "integer", "maximum": 99},
                             "maxItems": 3}},
    "required": ["terms"],
    "additionalProperties": False,
}  # fmt: skip
SCHEMAS = {"weather": CITY, "add": SUM}


def function(name: str, **fields: Any) -> Any:
    shown = {"name": name, "description": "", "parameters": SCHEMAS[name], **fields}
    return {"type": "function", "function": shown}


TOOLS: list[Any] = [function(name) for name in SCHEMAS]
NAMED: Any = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving() as system:
        yield system


@pytest.fixture
def client(live: Live) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{live.http}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize(("choice", "names"), [("required", {*SCHEMAS}), (NAMED, {"add"})])
async def test_forced_calls_follow_their_schemas(
    client: AsyncOpenAI, choice: Any, names: set[str], temperature: float
):
    answer = await client.chat.completions.create(
        model=MODEL, messages=CHAT, tools=TOOLS, tool_choice=choice, n=6, seed=1,
        temperature=temperature, max_tokens=300, parallel_tool_calls=False,
    )  # fmt: skip
    for each in answer.choices:
        assert each.finish_reason == "tool_calls"
        assert not each.message.content
        [call] = each.message.tool_calls or []
        assert call.type == "function" and call.function.name in names
        validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


async def test_streamed_call_is_the_whole_one(client: AsyncOpenAI):
    fields: Any = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "tool_choice": "required",
                   "temperature": 1.0, "seed": 3, "max_tokens": 300,
                   "parallel_tool_calls": False}  # fmt: skip
    whole, events = await asyncio.gather(
        client.chat.completions.create(**fields),
        client.chat.completions.create(stream=True, **fields),
    )
    [expected] = whole.choices[0].message.tool_calls or []
    names, arguments, reasons = [], "", []
    async for event in events:
        [choice] = event.choices
        reasons.append(choice.finish_reason)
        for delta in choice.delta.tool_calls or []:
            assert delta.function is not None and delta.index == 0
            arguments += delta.function.arguments or ""
            if delta.id is not None:
                names.append(delta.function.name)
    assert names == [expected.function.name]
    assert arguments == expected.function.arguments
    assert reasons[-1] == "tool_calls" and {*reasons[:-1]} == {None}


async def test_schema_that_cannot_be_enforced_is_refused(client: AsyncOpenAI):
    tool = function("add", parameters={"type": "object", "properties": {"a": {"not": {}}}})
    with pytest.raises(BadRequestError, match="the parameters of add: cannot be enforced") as error:
        await client.chat.completions.create(
            model=MODEL, messages=CHAT, tools=[tool], tool_choice="required"
        )
    assert error.value.param == "tools"

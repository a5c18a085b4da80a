"""Tools of a live server with the demo model, by the openai client: forced calls follow their
schemas, at any temperature."""

import asyncio
import json
from typing import Any

import pytest
from jsonschema import validate
from openai import AsyncOpenAI, BadRequestError

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


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}},
              "required": ["expression"]}  # fmt: skip


def offer(name: str, parameters: object, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


AGENT_TOOLS: list[Any] = [offer("get_weather", WEATHER), offer("calculate", EXPRESSION)]


async def test_model_calls_a_tool_and_answers_with_its_result(client: AsyncOpenAI):
    question: Any = {"role": "user", "content": "What is the weather in Paris?"}
    fields: Any = {"model": MODEL, "tools": AGENT_TOOLS, "temperature": 0}
    called = await client.chat.completions.create(messages=[question], **fields)
    message = called.choices[0].message
    [call] = message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather", {"city": "Paris"},
    )  # fmt: skip
    assert called.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 20 degrees"}
    history: Any = [question, message, result]
    answered = await client.chat.completions.create(messages=history, **fields)
    assert answered.choices[0].message.content == "Paris: sunny, 20 degrees"
    assert answered.choices[0].finish_reason == "stop"


async def test_model_calls_two_tools_at_once_and_none_where_none_is_needed(client: AsyncOpenAI):
    def ask(text: str, **more: Any) -> Any:
        return client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], tools=AGENT_TOOLS,
            temperature=0, **more,
        )  # fmt: skip

    both = "What is the weather in Paris and in Rome?"
    two, one, none = await asyncio.gather(
        ask(both), ask(both, parallel_tool_calls=False), ask("Sort: pear apple fig")
    )
    cities = [json.loads(call.function.arguments)["city"]
              for call in two.choices[0].message.tool_calls]  # fmt: skip
    assert cities == ["Paris", "Rome"]
    assert len(one.choices[0].message.tool_calls) == 1
    assert none.choices[0].message.tool_calls is None
    assert none.choices[0].message.content == "apple fig pear"


async def test_strict_tool_is_enforced_within_a_free_answer(client: AsyncOpenAI):
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}},
              "required": ["city"], "additionalProperties": False}  # fmt: skip
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[offer("get_weather", schema, strict=True)], temperature=0,
    )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    validate(json.loads(call.function.arguments), schema)


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_apart_from_the_content(client: AsyncOpenAI, stream: bool):
    question = {"role": "user", "content": "Think: Reverse: red blue green"}
    fields: Any = {"model": MODEL, "temperature": 0, "messages": [question]}
    if stream:
        events = await client.chat.completions.create(stream=True, **fields)
        deltas = [event.choices[0].delta async for event in events]
        reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        answer = await client.chat.completions.create(**fields)
        message = answer.choices[0].message
        reasoning, content = getattr(message, "reasoning_content", ""), message.content or ""
        details = answer.usage and answer.usage.completion_tokens_details
        assert details is not None and details.reasoning_tokens
    assert (reasoning, content) == ("Task: reverse.", "green blue red")


async def test_budget_ends_reasoning(client: AsyncOpenAI):
    answer = await client.chat.completions.create(
        model=MODEL, temperature=0, extra_body={"thinking_token_budget": 4},
        messages=[{"role": "user", "content": "Think: Reverse: red blue green"}],
    )  # fmt: skip
    reasoning = getattr(answer.choices[0].message, "reasoning", "")
    assert reasoning and "Task: reverse.".startswith(reasoning) and reasoning != "Task: reverse."
    assert answer.choices[0].message.content

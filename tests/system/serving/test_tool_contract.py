"""OpenAI's contract of tool calls, by the openai client at a live server: what each answer, each
stream and each refusal must have."""

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, pydantic_function_tool
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

pytestmark = pytest.mark.slow
BOTH = "What is the weather in Paris and in Rome?"
USER: Any = {"role": "user", "content": BOTH}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]


class GetWeather(BaseModel):
    city: str


def fields(**given: Any) -> Any:
    return {"model": "demo", "messages": [USER], "tools": TOOLS, "temperature": 0, **given}


async def ask(client: AsyncOpenAI, **given: Any) -> ChatCompletion:
    answer: ChatCompletion = await client.chat.completions.create(**fields(**given))
    return answer


async def stream(client: AsyncOpenAI, **given: Any) -> list[ChatCompletionChunk]:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    events = await client.chat.completions.create(**fields(**given), **options)
    return [event async for event in events]


def called(answer: ChatCompletion, index: int = 0) -> list[tuple[str, Any]]:
    calls: Any = answer.choices[index].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def history(answer: ChatCompletion, *results: tuple[int | str, str]) -> list[Any]:
    """The conversation so far, with results for the calls of these numbers or ids."""
    message = answer.choices[0].message
    ids = [call.id for call in message.tool_calls or []]
    return [USER, message, *(
        {"role": "tool", "tool_call_id": ids[of] if isinstance(of, int) else of, "content": text}
        for of, text in results
    )]  # fmt: skip


async def test_answer_has_its_calls_and_no_content(client: AsyncOpenAI):
    answer = await ask(client, n=2, logprobs=True)
    ids = [call.id for each in answer.choices for call in each.message.tool_calls or []]
    assert len(set(ids)) == len(ids) == 4
    for index, choice in enumerate(answer.choices):
        assert called(answer, index) == CALLS and choice.index == index
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        assert all(call.type == "function" for call in choice.message.tool_calls or [])
    assert answer.usage is not None
    logprobs = [len((each.logprobs and each.logprobs.content) or []) for each in answer.choices]
    assert sum(logprobs) == answer.usage.completion_tokens


async def test_stream_tells_each_call_once_and_in_order(client: AsyncOpenAI):
    whole, events = await asyncio.gather(ask(client), stream(client))
    *chunks, last = events
    assert last.usage == whole.usage and not last.choices
    assert len({event.id for event in events}) == 1
    choices = [event.choices[0] for event in chunks]
    assert choices[0].delta.role == "assistant"
    assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    assert not "".join(c.delta.content or "" for c in choices)
    deltas = [call for c in choices for call in c.delta.tool_calls or []]
    assert [call.index for call in deltas] == sorted(call.index for call in deltas)
    arguments = ["", ""]
    for call in deltas:
        assert call.function is not None
        begins = not arguments[call.index] and call.id is not None
        assert begins == (call.function.name is not None) == (call.type is not None)
        assert begins or call.function.arguments
        arguments[call.index] += call.function.arguments or ""
    assert sum(call.id is not None for call in deltas) == 2
    assert [("get_weather", json.loads(each)) for each in arguments] == CALLS


async def test_clients_accumulators_parse_strict_tools(client: AsyncOpenAI):
    tools = [pydantic_function_tool(GetWeather, name="get_weather")]
    parsed = await client.chat.completions.parse(**fields(tools=tools))
    kinds = set()
    async with client.chat.completions.stream(**fields(tools=tools)) as events:
        async for event in events:
            kinds.add(event.type)
        streamed = await events.get_final_completion()
    for answer in (parsed, streamed):
        calls = answer.choices[0].message.tool_calls or []
        assert [call.function.parsed_arguments for call in calls] == [
            GetWeather(city="Paris"), GetWeather(city="Rome"),
        ]  # fmt: skip
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


@pytest.mark.parametrize(
    ("given", "names", "reason"),
    [
        ({"tool_choice": "none"}, [], "stop"),
        ({"tools": [], "tool_choice": "auto"}, [], "stop"),
        ({"parallel_tool_calls": False}, ["get_weather"], "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ["now"], "tool_calls"),
        ({"messages": [{"role": "user", "content": "Sort: pear fig"}]}, [], "stop"),
        ({"messages": [{"role": "user", "content": "Sort: pear fig"}], "tool_choice": "required",
          "parallel_tool_calls": False, "tools": TOOLS[:1]}, ["get_weather"], "tool_calls"),
    ],
)  # fmt: skip
async def test_choice_of_tools_decides_calls_and_reason(
    client: AsyncOpenAI, given: dict[str, Any], names: list[str], reason: str
):
    given = {"max_tokens": 200, **given}
    answer, events = await asyncio.gather(ask(client, **given), stream(client, **given))
    choice = answer.choices[0]
    assert [name for name, _ in called(answer)] == names
    assert choice.finish_reason == events[-2].choices[0].finish_reason == reason
    assert (choice.message.content is None) == bool(names)


async def test_results_are_accepted_in_any_order_and_as_parts(client: AsyncOpenAI):
    answer = await ask(client)
    parts: Any = [{"type": "text", "text": "rainy, 9 degrees"}]
    for results in ([(0, "sunny, 20 degrees"), (1, parts)], [(1, parts), (0, "sunny, 20 degrees")]):
        told = await ask(client, messages=history(answer, *results))
        assert told.choices[0].finish_reason == "stop" and not called(told)
        assert (told.choices[0].message.content or "").startswith("Paris: ")


@pytest.mark.parametrize("tokens", range(1, 60, 7))
async def test_limit_leaves_a_valid_beginning(client: AsyncOpenAI, tokens: int):
    answer, events = await asyncio.gather(
        ask(client, max_tokens=tokens), stream(client, max_tokens=tokens)
    )
    choice = answer.choices[0]
    assert choice.finish_reason == events[-2].choices[0].finish_reason == "length"
    assert "{" not in (choice.message.content or "")
    calls: Any = choice.message.tool_calls or []
    assert all('{"city": "Paris"}'.startswith(call.function.arguments) for call in calls)
    deltas = [call.function for e in events[:-1] for call in e.choices[0].delta.tool_calls or []]
    streamed = "".join(each.arguments or "" for each in deltas if each)
    assert streamed == "".join(call.function.arguments for call in calls)


@pytest.mark.parametrize("stop", ["Rome", "Par", "</tool_call>", "{"])
async def test_stop_within_calls_is_no_failure(client: AsyncOpenAI, stop: str):
    answer, events = await asyncio.gather(ask(client, stop=stop), stream(client, stop=stop))
    assert answer.choices[0].finish_reason == events[-2].choices[0].finish_reason
    assert stop not in str(called(answer))


FUNCTION: Any = TOOLS[0]["function"]
BAD_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{bad"}}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}},
         "tool_choice.function.name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {**FUNCTION, "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [BAD_CALL]}]},
         "messages[1].tool_calls[0].function.arguments"),
        ({"functions": [FUNCTION]}, "functions"),
    ],
)  # fmt: skip
async def test_mistake_is_refused_with_its_place(client: AsyncOpenAI, given: Any, param: str):
    with pytest.raises(BadRequestError) as error:
        await ask(client, **given)
    assert error.value.param == param


async def test_result_of_an_unknown_call_is_refused(client: AsyncOpenAI):
    answer = await ask(client)
    for messages in (
        history(answer, (0, "x"), ("nope", "y")),
        [USER, history(answer, (0, "x"))[2]],
    ):
        with pytest.raises(BadRequestError, match="is not the id of a call") as error:
            await ask(client, messages=messages)
        assert error.value.param == f"messages[{len(messages) - 1}].tool_call_id"

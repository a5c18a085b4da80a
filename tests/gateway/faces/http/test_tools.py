"""Tools and reasoning in chat bodies and answers, with a scripted worker."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.faces.http.dialect.content import decode_messages
from gateway.faces.http.dialect.tools import read_tool_use, read_tools
from gateway.types.tools import Tool, ToolUse
from protos.generated.worker_pb2 import Prompt
from services.runtime.errors import InvalidArgument
from tests.gateway.gateway_fakes import Harness, Reply, demo_text, run_harness, tokens_of
from tests.gateway.grammars.walks import draw_answer

TEMPLATE = """{% if tools %}tools={{ tools | tojson }}{% endif %}{# <think> <tool_call> #}
{%- for m in messages %}|{{ m.role }}:{{ m.content }}{% if m.tool_calls %}
{%- for c in m.tool_calls %}<{{ c.id }} {{ c.function.name }} {{ c.function.arguments.a }}>
{%- endfor %}{% endif %}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
USER = {"role": "user", "content": "1,"}
NAME_F = {"type": "function", "function": {"name": "f"}}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def deep(levels: int) -> dict[str, Any]:
    return {"a": deep(levels - 1)} if levels else {}


F, G = Tool("f", parameters=SCHEMA), Tool("g")
TOOLS = [tool("f", parameters=SCHEMA), tool("g")]


@dataclass
class Scripted:
    """A gateway with a worker that answers with a text."""

    harness: Harness
    answer: list[int] = field(default_factory=list)

    async def ask(self, text: str, **fields: Any) -> Reply:
        self.answer[:] = tokens_of(text)
        body = {"messages": [USER], **fields}
        return await self.harness.http("POST", "/v1/chat/completions", body)

    async def choice(self, text: str, **fields: Any) -> dict[str, Any]:
        reply = await self.ask(text, **fields)
        assert reply.status == 200, reply.text
        return dict(reply.json["choices"][0])

    async def deltas(self, text: str, **fields: Any) -> tuple[list[dict[str, Any]], Any]:
        """The deltas with adjacent ones of one kind joined, and the finish reason."""
        reply = await self.ask(text, stream=True, **fields)
        assert reply.status == 200, reply.text
        choices = [event["choices"][0] for event in reply.events if event["choices"]]
        assert all(choice["finish_reason"] is None for choice in choices[:-1])
        return join([c["delta"] for c in choices]), choices[-1]["finish_reason"]

    @property
    def prompt(self) -> Prompt:
        return self.harness.worker.prompts[-1]

    @property
    def prompt_text(self) -> str:
        return demo_text().decode(list(self.prompt.token_ids), False)


def join(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    for delta in deltas:
        last = joined[-1] if joined else {}
        if delta.keys() == last.keys() and "tool_calls" not in delta:
            joined[-1] = {name: last[name] + delta[name] for name in delta}
        elif "id" not in (call := delta.get("tool_calls", [{}])[0]) and call:
            before = last["tool_calls"][0]
            assert before["index"] == call["index"]
            before["function"]["arguments"] += call["function"]["arguments"]
        elif delta:
            joined.append(delta)
    return joined


@pytest.fixture
async def scripted(tmp_path: Path) -> AsyncIterator[Scripted]:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    answer: list[int] = []
    async with run_harness(lambda _: answer, chat_template=str(template)) as harness:
        yield Scripted(harness, answer)


async def test_streamed_call_has_the_deltas_of_openai(scripted: Scripted):
    deltas, reason = await scripted.deltas("Hi.\n" + CALL, tools=TOOLS)
    role, content, call = deltas
    assert role == {"role": "assistant", "content": ""}
    assert content == {"content": "Hi."}
    [entry] = call["tool_calls"]
    assert entry.pop("id").startswith("call_")
    assert entry == {"index": 0, "type": "function",
                     "function": {"name": "f", "arguments": '{"a": 1}'}}  # fmt: skip
    assert reason == "tool_calls"


async def test_arguments_are_streamed_in_pieces(scripted: Scripted):
    long = '{"a": "' + "x" * 200 + '"}'
    text = f'<tool_call>{{"name": "f", "arguments": {long}}}</tool_call>'
    reply = await scripted.ask(text, tools=TOOLS, stream=True)
    deltas = [event["choices"][0]["delta"] for event in reply.events]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert "id" in calls[0] and calls[0]["function"] == {"name": "f", "arguments": ""}
    assert all(call.keys() == {"index", "function"} for call in calls[1:])
    assert len(calls) > 3
    assert "".join(call["function"]["arguments"] for call in calls) == long
    assert reply.events[-1]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls",
    }  # fmt: skip


async def test_whole_answer_has_its_calls(scripted: Scripted):
    second = CALL.replace('"f"', '"g"')
    choice = await scripted.choice(f"{CALL}\n{second}", tools=TOOLS)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    one = await scripted.choice(f"{CALL}\n{second}", tools=TOOLS, parallel_tool_calls=False)
    assert len(one["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(
    "text",
    ['<tool_call>\n{"name": "f", "arguments": {"a": ]}}\n</tool_call> sorry',
     '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>', "<tool_call>", "Hi <tool"],
)  # fmt: skip
async def test_malformed_call_is_content(scripted: Scripted, text: str):
    choice = await scripted.choice(text, tools=TOOLS)
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]
    deltas, reason = await scripted.deltas(text, tools=TOOLS)
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert reason == "stop"


async def test_limit_within_a_call_keeps_the_beginning_of_its_arguments(scripted: Scripted):
    choice = await scripted.choice(CALL, tools=TOOLS, max_tokens=len(CALL) - 18)
    [call] = choice["message"]["tool_calls"]
    assert '{"a": 1}'.startswith(call["function"]["arguments"])
    assert choice["finish_reason"] == "length"


async def test_text_without_tools_is_content(scripted: Scripted):
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = await scripted.choice(CALL, **fields)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "tools=" not in scripted.prompt_text


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"f", "g"}),
        (NAME_F, {"f"}),
        ({"type": "allowed_tools",
          "allowed_tools": {"mode": "required", "tools": [tool("g")]}}, {"g"}),
    ],
)  # fmt: skip
async def test_forced_call_follows_a_grammar(scripted: Scripted, choice: Any, names: set[str]):
    tools = [tool("f", parameters=PARAMETERS), tool("g", parameters=PARAMETERS)]
    await scripted.ask(CALL, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    grammar = scripted.prompt.sampling.grammar
    for seed in range(6):
        text = draw_answer(grammar, Random(seed))
        assert text is not None
        called = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        assert called["name"] in names
        assert called["arguments"]["a"] in (1, 2)
    assert "tools=" in scripted.prompt_text


async def test_strict_tools_are_enforced_from_the_opening_tag_on(scripted: Scripted):
    strict = [tool("f", parameters=PARAMETERS, strict=True)]
    choice = await scripted.choice(CALL, tools=strict)
    assert choice["finish_reason"] == "tool_calls"
    assert "<tool_call>" in scripted.prompt.sampling.grammar
    await scripted.choice(CALL, tools=[tool("f", parameters=PARAMETERS)])
    assert not scripted.prompt.sampling.grammar


async def test_schema_that_cannot_be_enforced_names_the_tool(scripted: Scripted):
    tools = [tool("f"), tool("g", parameters={"properties": {"a": {"not": {}}}})]
    reply = await scripted.ask(CALL, tools=tools, tool_choice="required")
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, "tools")
    assert "the parameters of g: cannot be enforced" in error["message"]


async def test_history_is_shown_to_the_template(scripted: Scripted):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    await scripted.choice("x", messages=messages, tools=TOOLS)
    assert scripted.prompt_text.endswith("|user:1,|assistant:<c1 f 7>|tool:ok#c1")
    assert '"name": "g"' in scripted.prompt_text


async def test_reasoning_is_apart_from_the_content(scripted: Scripted):
    text = "<think>\nso é\n</think>\n\nHi there"
    choice = await scripted.choice(text)
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi there", "so é")
    assert message["reasoning"] == "so é"
    deltas, reason = await scripted.deltas(text)
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "so é", "reasoning": "so é"},
        {"content": "Hi there"},
    ]
    assert reason == "stop"
    both = await scripted.choice(f"<think>so</think>{CALL}", tools=TOOLS)
    assert (both["message"]["reasoning"], both["finish_reason"]) == ("so", "tool_calls")


async def test_reasoning_can_be_left_out_or_kept(scripted: Scripted):
    text = "<think>so</think>Hi"
    without = await scripted.choice(text, include_reasoning=False)
    assert without["message"] == {"role": "assistant", "content": "Hi", "refusal": None}
    deltas, _ = await scripted.deltas(text, include_reasoning=False)
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hi"}]
    kept = await scripted.choice(text, separate_reasoning=False)
    assert kept["message"]["content"] == text


@pytest.mark.parametrize("text", ["<think>so</think>Hi", "Hi", "<think>so"])
async def test_usage_counts_reasoning_tokens(scripted: Scripted, text: str):
    reply = await scripted.ask(text)
    expected = len(text.removesuffix("Hi"))
    details = {"reasoning_tokens": expected}
    assert reply.json["usage"]["completion_tokens_details"] == details
    options = {"stream_options": {"include_usage": True}}
    streamed = await scripted.ask(text, stream=True, **options)
    assert streamed.events[-1]["usage"] == reply.json["usage"]


async def test_logprobs_and_ids_of_all_tokens_are_streamed(scripted: Scripted):
    text = f"<think>so</think>Hi {CALL}"
    fields = {"logprobs": True, "return_token_ids": True, "stream": True}
    reply = await scripted.ask(text, tools=TOOLS, **fields)
    choices = [event["choices"][0] for event in reply.events]
    assert sum(len(c["logprobs"]["content"]) for c in choices) == len(text)
    assert [token for c in choices for token in c["token_ids"]] == scripted.answer


NO_TOOLS = [
    # tools, field, part of the sentence
    ({}, "tools", "must be a list"),
    ([7], "tools[0]", "must be an object"),
    ([{"type": "web_search"}], "tools[0].type", "only tools of type 'function'"),
    ([tool("")], "tools[0].function.name", "must be 1 to 256 letters"),
    ([tool("a b")], "tools[0].function.name", "must be 1 to 256 letters"),
    ([tool(), tool()], "tools[1].function.name", "another tool is named 'f', too"),
    ([tool(description=7)], "tools[0].function.description", "must be a string"),
    ([tool(strict="yes")], "tools[0].function.strict", "must be true or false"),
    ([tool(parameters=[])], "tools[0].function.parameters", "must be a JSON schema of an object"),
    ([tool(parameters={"type": "string"})], "tools[0].function.parameters.type", "'object'"),
    ([tool(parameters={"properties": []})], "tools[0].function.parameters.properties", "an object"),
    ([tool(parameters={"properties": {"a": 1}})], "tools[0].function.parameters.properties.a",
     "must be a JSON schema"),
    ([tool(parameters={"required": "a"})], "tools[0].function.parameters.required", "a list"),
    ([tool(parameters=deep(101))], "tools[0].function.parameters", "nested too deeply"),
    ([tool(f"f{n}") for n in range(513)], "tools", "at most 512 tools, got 513"),
    ([tool(description="x" * 2**20)], "tools", "at most 1048576 bytes as JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "name", "part"), NO_TOOLS)
def test_mistake_in_tools_names_its_place(tools: object, name: str, part: str):
    with pytest.raises(InvalidArgument, match=part) as caught:
        read_tools(tools)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, ToolUse([F, G])),
        ("auto", ToolUse([F, G])),
        ("none", None),
        ("required", ToolUse([F, G], required=True)),
        (NAME_F, ToolUse([F], required=True, parallel=False)),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAME_F]}},
         ToolUse([F])),
    ],
)  # fmt: skip
def test_tool_choice_selects_tools(choice: object, use: ToolUse | None):
    assert read_tool_use(read_tools(TOOLS), choice, True) == use


@pytest.mark.parametrize(
    ("choice", "name", "part"),
    [
        ("any", "tool_choice", "must be none, auto, required, a function or allowed_tools"),
        (7, "tool_choice", "must be none, auto"),
        ({}, "tool_choice.type", "must be function or allowed_tools, not None"),
        ({"type": "function"}, "tool_choice.function.name", "is missing"),
        (tool("h"), "tool_choice.function.name", "'h' is not one of the tools: f, g"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools", "must be an object"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [NAME_F]}},
         "tool_choice.allowed_tools.mode", "must be auto or required"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
         "tool_choice.allowed_tools.tools", "at least of one tool"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("h")]}},
         "tool_choice.allowed_tools.tools[0].function.name", "'h' is not one of"),
    ],
)  # fmt: skip
def test_mistake_in_tool_choice_names_its_place(choice: object, name: str, part: str):
    with pytest.raises(InvalidArgument, match=part) as caught:
        read_tool_use(read_tools(TOOLS), choice, True)
    assert caught.value.field == name


def call(**fields: Any) -> dict[str, Any]:
    return {"id": "c", "function": {"name": "f", "arguments": "{}"}, **fields}


@pytest.mark.parametrize(
    ("calls", "name", "part"),
    [
        (7, "", "must be a list of calls"),
        ([call(id=None)], "[0].id", "is missing"),
        ([call(type="custom")], "[0].type", "must be 'function'"),
        ([call(function={"arguments": "{}"})], "[0].function.name", "must be 1 to 256"),
        ([call(function={"name": "f", "arguments": "{"})], "[0].function.arguments", "JSON object"),
        (
            [call(function={"name": "f", "arguments": json.dumps(deep(101))})],
            "[0].function.arguments",
            "nested too deeply",
        ),
        ([call(function={"name": "f", "arguments": "[]"})], "[0].function.arguments", "object"),
    ],
)
def test_mistake_in_earlier_calls_names_its_place(calls: object, name: str, part: str):
    with pytest.raises(InvalidArgument, match=part) as caught:
        decode_messages([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert caught.value.field == f"messages[0].tool_calls{name}"


@pytest.mark.parametrize("content", ["1,", "1,<think>"])
async def test_prompt_for_other_servers_says_what_applies_behind_reasoning(
    scripted: Scripted, content: str
):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    user = {"role": "user", "content": content}
    await scripted.choice('{"a": 1}', messages=[user], response_format=form)
    source = scripted.prompt.sampling.source
    assert (source.kind, source.behind_reasoning) == ("json_schema", "<think>" in content)

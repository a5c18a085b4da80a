"""The demo model's chat format: the messages, the chat template, and the same format in Python.

Tools are listed at the end of the system turn, by name and parameter names only. Calls and results
have the tags that Hermes and Qwen use.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

END = "<|end|>"
THINK = "Think: "  # begins a prompt that asks for <think>…</think> before the answer

CHAT_TEMPLATE = (
    "{%- macro signature(tool) -%}"
    "{%- set function = tool['function'] or tool -%}"
    "{%- set parameters = (function['parameters'] or {})['properties'] or {} -%}"
    "{{ function['name'] ~ '(' ~ parameters | join(', ') ~ ')' }}"
    "{%- endmacro -%}"
    "{%- macro call(tool_call) -%}"
    "{%- set function = tool_call['function'] or tool_call -%}"
    "{%- set arguments = function['arguments'] or {} -%}"
    """{{ '<tool_call>\\n{"name": "' ~ function['name'] ~ '", "arguments": ' }}"""
    "{{ arguments if arguments is string else arguments | tojson }}{{ '}\\n</tool_call>' }}"
    "{%- endmacro -%}"
    "{%- set offered -%}"
    "{%- if tools -%}{{ 'Tools: ' }}"
    "{%- for tool in tools -%}{{ signature(tool) ~ ('' if loop.last else ', ') }}{%- endfor -%}"
    "{%- endif -%}"
    "{%- endset -%}"
    "{%- if offered and messages[0]['role'] != 'system' -%}"
    "{{ '<|system|>' + offered + '<|end|>' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- set role, content = message['role'], message['content'] or '' -%}"
    "{%- if role == 'tool' -%}"
    "{{ '\\n' if loop.previtem is defined and loop.previtem['role'] == 'tool' else '<|user|>' }}"
    "{{ '<tool_response>\\n' + content + '\\n</tool_response>' }}"
    "{{ '<|end|>' if loop.last or loop.nextitem['role'] != 'tool' else '' }}"
    "{%- elif role == 'assistant' -%}"
    "{%- set thought = not loop.last and '<think>' in content -%}"
    "{%- set text = content.split('</think>')[-1] if thought else content -%}"
    "{{ '<|assistant|>' + text }}"
    "{%- for tool_call in message['tool_calls'] or [] -%}"
    "{{ '' if loop.first and not text else '\\n' }}{{ call(tool_call) }}"
    "{%- endfor -%}"
    "{{ '<|end|>' }}"
    "{%- elif role == 'system' -%}"
    "{{ '<|system|>' + content + ('\\n' + offered if offered and loop.first else '') + '<|end|>' }}"
    "{%- elif role == 'user' -%}"
    "{{ '<|user|>' + ('Think: ' if enable_thinking and content[:7] != 'Think: ' else '') }}"
    "{{ content + '<|end|>' }}"
    "{%- else -%}"
    "{{ raise_exception('Unknown role: ' + role) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


class Function(TypedDict):
    """The name and the arguments of a call."""

    name: str
    arguments: Mapping[str, str]


class ToolCall(TypedDict):
    """One call of a tool."""

    function: Function


class Message(TypedDict):
    """One turn of a chat, in the chat template's format."""

    role: str
    content: str
    tool_calls: NotRequired[list[ToolCall]]


@dataclass(frozen=True)
class Tool:
    """A tool of string parameters."""

    name: str
    parameters: tuple[str, ...]

    @property
    def schema(self) -> dict[str, object]:
        """The tool as `tools` of a request lists it."""
        properties = {parameter: {"type": "string"} for parameter in self.parameters}
        parameters = {"type": "object", "properties": properties, "required": [*properties]}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}


Turns = list[tuple[str, str]]
"""Pairs of prompt text, as the model reads it, and answer text."""


def turns(messages: Sequence[Message], tools: Sequence[Tool], answer: str) -> Turns:
    """Returns the turns of a conversation, equal to the chat template, which is slower.

    An earlier answer to a prompt that starts with `THINK` is part of the next turn's prompt: the
    template leaves its thoughts out.
    """
    given: Turns = []
    prompt = ""
    for message in _with_tools(messages, tools):
        match message["role"]:
            case "assistant" if f"<|user|>{THINK}" in prompt:
                prompt += f"<|assistant|>{_answer(message)}{END}"
            case "assistant":
                given.append((f"{prompt}<|assistant|>", _answer(message)))
                prompt = ""
            case "tool" if prompt.endswith(f"</tool_response>{END}"):
                prompt = f"{prompt.removesuffix(END)}\n{_result(message)}{END}"
            case "tool":
                prompt += f"<|user|>{_result(message)}{END}"
            case role:
                prompt += f"<|{role}|>{message['content']}{END}"
    return [*given, (f"{prompt}<|assistant|>", answer)]


def calls_text(calls: Sequence[ToolCall]) -> str:
    """Returns the calls as the model writes them."""
    return "\n".join(f"<tool_call>\n{json.dumps(c['function'])}\n</tool_call>" for c in calls)


def _with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[Message]:
    offered = ", ".join(f"{tool.name}({', '.join(tool.parameters)})" for tool in tools)
    first, *rest = messages
    if not offered:
        yield first
    elif first["role"] == "system":
        yield Message(role="system", content=f"{first['content']}\nTools: {offered}")
    else:
        yield Message(role="system", content=f"Tools: {offered}")
        yield first
    yield from rest


def _answer(message: Message) -> str:
    return message["content"] or calls_text(message.get("tool_calls", []))


def _result(message: Message) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"

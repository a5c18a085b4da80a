"""Reads answers by the `response_template` of a tokenizer, with transformers' parser."""

import json
from collections.abc import Iterator, Mapping, Sequence

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from gateway.readers.calls.ids import make_call_id
from gateway.readers.states import merge_parts
from gateway.types.answer_parts import (
    AnswerPart,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from gateway.types.tools import Tool
from services.runtime.config import ConfigError

REASONING = frozenset(("thinking", "reasoning", "reasoning_content"))  # names of fields
CONTENT, CALLS = "content", "tool_calls"


class TemplateReader:
    """Reads reasoning and content as they arrive, and each region of calls when it ends. A region
    that cannot be read, and all text behind it, is content.

    The parser gets one character at a time: it loses the events of a piece in which it fails.
    """

    def __init__(
        self,
        template: Mapping[str, object],
        prompt_end: str,
        tools: Mapping[str, Tool],
        parallel: bool,
    ):
        self._tools, self._parallel = tools, parallel
        self._index = -1
        self._unsaid = ""  # text that is in no part yet
        self._failed = False
        shown = [dict(tool.shown) for tool in tools.values()]
        try:
            self._parser = ResponseParser(dict(template), prefix=prompt_end, tools=shown)
        except Exception:  # as in `finish`, for what the prompt begins
            self._parser, self._failed = ResponseParser(dict(template), prefix=""), True

    def feed(self, text: str) -> Sequence[AnswerPart]:
        return merge_parts([part for char in text for part in self._feed_char(char)])

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        if self._failed:
            return []
        parts: list[AnswerPart] = []
        try:
            _, events = self._parser.finalize()
            parts.extend(self._read(events))
        except Exception:  # of a content parser or a transform, of many types
            parts += self._fail()
        return merge_parts(parts)

    def _feed_char(self, char: str) -> Iterator[AnswerPart]:
        if self._failed:
            yield Content(char)
            return
        self._unsaid += char
        try:
            yield from self._read(self._parser.feed(char))
        except Exception:
            yield from self._fail()

    def _fail(self) -> Sequence[AnswerPart]:
        self._failed = True
        text, self._unsaid = self._unsaid, ""
        return [Content(text)] if text else []

    def _read(self, events: Sequence[Mapping[str, object]]) -> Iterator[AnswerPart]:
        for event in events:
            match event:
                case {"type": "region_chunk", "field": str(name), "text": str(text)} if (
                    name == CONTENT or name in REASONING
                ):
                    self._unsaid = self._unsaid[self._unsaid.find(text) + len(text) :]
                    yield Content(text) if name == CONTENT else Reasoning(text)
                case {"type": "region_close", "field": "tool_calls", "value": value}:
                    yield from self._read_calls(value if isinstance(value, list) else [value])

    def _read_calls(self, values: Sequence[object]) -> Iterator[AnswerPart]:
        """Raises ValueError for a call that the request does not offer."""
        calls = [_read_call(value) for value in values]
        if any(name not in self._tools for name, _ in calls):
            raise ValueError("the function is not offered")
        self._unsaid = ""
        for name, arguments in calls:
            if self._index >= 0 and not self._parallel:
                return
            self._index += 1
            yield ToolCallStart(self._index, make_call_id(name, self._index), name)
            yield ToolCallArguments(self._index, arguments)


def check_template(template: Mapping[str, object]) -> None:
    """Raises ConfigError for a template that cannot be used."""
    try:
        load_response_template(dict(template))
    except ValueError as error:
        raise ConfigError(f"gateway.model: its response_template is invalid: {error}") from None


def _read_call(value: object) -> tuple[str, str]:
    """The name and arguments of a call. Raises ValueError."""
    match value:
        case {"function": {"name": str(name), "arguments": Mapping() as arguments}}:
            return name, json.dumps(arguments, ensure_ascii=False)
        case {"function": {"name": str(name), "arguments": str(text)}}:
            if isinstance(json.loads(text), dict):
                return name, text
    raise ValueError("not a call with a name and arguments")

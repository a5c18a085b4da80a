"""Reads answers in the harmony format of gpt-oss: messages on channels. Pure.

`<|channel|>analysis` is reasoning, `final` and `commentary` are content, and a message
`to=functions.NAME` is a call with JSON arguments. The recipient is in the role or in the channel.
Source: OpenAI, "OpenAI harmony response format", sections "Channels" and "Function calling".
"""

import json

from gateway.readers.calls.ids import make_call_id
from gateway.readers.patterns import Found, compile_pattern
from gateway.readers.scanning import BracketScanner, count_held, find_mark
from gateway.readers.states import StateReader
from gateway.types.answer_parts import (
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallMalformed,
    ToolCallStart,
)
from gateway.types.tools import Tools

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", f"{START}assistant")
AFTER_CALL = ("<|call|>", "<|end|>", "<|return|>")
FUNCTIONS = "functions."
TO = r"to=(?P<{}>[^<\s]{{1,300}})"
HEADER = compile_pattern(
    rf"(<\|start\|> assistant)? ({TO.format('role')} )?"
    rf"(<\|channel\|> (?P<channel>[a-z]{{1,32}}) ({TO.format('to')} )?)?"
    r"((<\|constrain\|> )?[a-z]{1,32} )?<\|message\|>"
)


class HarmonyReader(StateReader):
    """Reads the messages of one answer. Text without a header, and a call that is not JSON or that
    the request does not offer, is content. What a message tells another recipient than a function
    is dropped."""

    passes_content = False

    def __init__(self, tools: Tools, parallel: bool):
        super().__init__(self._read_header)
        self._tools, self._parallel = tools, parallel
        self._header = ""  # of the current call, with the blanks behind it
        self._arguments: list[str] = []  # pieces
        self._index = -1
        self._scanner = BracketScanner()
        self.reasoning_chars = 0  # of the answer, up to the end of the last reasoning

    def _read_header(self, final: bool) -> bool:
        found = HEADER.match(self._text, partial=True)
        if found is None:
            self._add(Content(self._take(1)))
            self._state = self._read_loose
            return True
        if found.partial:
            if final:  # a limit cut it
                self._text = "" if self._text.lstrip().startswith("<|") else self._text
                self._add(Content(self._take(len(self._text))))
            return False
        self._open(found)
        return True

    def _open(self, found: Found) -> None:
        """The state of a message with this header."""
        header = self._take(found.end())
        recipient = found.group("to") or found.group("role") or ""
        name = recipient.removeprefix(FUNCTIONS)
        if recipient.startswith(FUNCTIONS) and name in self._tools:
            self._index += 1
            self._header, self._arguments, self._scanner = header, [], BracketScanner()
            call_id = make_call_id(name, self._index)
            self._add(ToolCallStart(self._index, call_id, name))
            self._state = self._read_arguments
        elif recipient.startswith(FUNCTIONS):
            self._add(Content(header))
            self._state = self._read_content
        elif recipient and recipient != "assistant":
            self._state = self._drop
        elif found.group("channel") == "analysis":
            self._state = self._read_reasoning
        else:
            self._state = self._read_content

    def _read_loose(self, final: bool) -> bool:
        """Text without a header, up to what begins the next one."""
        text, marks = self._text, (START, CHANNEL)
        at, mark = find_mark(text, marks)
        if mark:
            self._add(Content(self._take(at)))
            self._state = self._read_header
            return True
        held = 0 if final else count_held(text, marks)
        self._add(Content(self._take(len(text) - held)))
        return False

    def _read_content(self, final: bool) -> bool:
        return self._read_body(final, Content)

    def _read_reasoning(self, final: bool) -> bool:
        more = self._read_body(final, Reasoning)
        self.reasoning_chars = self._read_chars
        return more

    def _drop(self, final: bool) -> bool:
        return self._read_body(final, None)

    def _read_body(self, final: bool, kind: type[Content] | type[Reasoning] | None) -> bool:
        text = self._text
        at, mark = find_mark(text, ENDS)
        held = 0 if mark or final else count_held(text, ENDS)
        body = self._take(at if mark else len(text) - held)
        if kind is not None:
            self._add(kind(body))
        if mark:
            self._take(0 if mark.startswith(START) else len(mark))
            self._state = self._read_header
        return bool(mark)

    def _read_arguments(self, final: bool) -> bool:
        scanner = self._scanner
        if not self._arguments:
            self._header += self._take(len(self._text) - len(self._text.lstrip()))
            if self._text and not self._text.startswith("{"):
                return self._withdraw()
        if piece := self._take(scanner.feed(self._text)):
            self._arguments.append(piece)
            self._add(ToolCallArguments(self._index, piece))
        if scanner.ended and _is_json("".join(self._arguments)):
            self._state = self._read_after_call
            return True
        if scanner.ended or scanner.failed or (final and not self._cut):
            return self._withdraw()
        return False

    def _read_after_call(self, final: bool) -> bool:
        body = self._text.lstrip()
        mark = next((each for each in AFTER_CALL if body.startswith(each)), "")
        if not mark and not final and any(each.startswith(body) for each in AFTER_CALL):
            return False
        self._take(len(self._text) - len(body) + len(mark))
        self._state = self._read_header if self._parallel else self._skip
        return True

    def _skip(self, final: bool) -> bool:
        """The state behind the one call that an answer may have."""
        self._text = ""
        return False

    def _withdraw(self) -> bool:
        self._add(ToolCallMalformed(self._index, "".join((self._header, *self._arguments))))
        self._state = self._read_content
        return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True

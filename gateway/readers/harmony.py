"""Reads answers in the harmony format of gpt-oss: messages on channels. Pure.

`<|channel|>analysis` is reasoning, `final` and `commentary` are content, and a message
`to=functions.NAME` is a call with JSON arguments. The recipient is in the role or in the channel.
Source: OpenAI, "OpenAI harmony response format", sections "Channels" and "Function calling".
"""

import json
from collections.abc import Sequence

from gateway.readers.calls.ids import make_call_id
from gateway.readers.content import State, add_part, over
from gateway.readers.patterns import Found, compile_pattern
from gateway.readers.scanning import BracketScanner, count_held, find_mark
from gateway.types.answer_parts import (
    AnswerPart,
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


class HarmonyReader:
    """Reads the messages of one answer. Text without a header, and a call that is not JSON or that
    the request does not offer, is content. What a message tells another recipient than a function
    is dropped."""

    passes_content = False

    def __init__(self, tools: Tools, parallel: bool):
        self._tools, self._parallel = tools, parallel
        self._text = ""  # not read yet
        self._read_chars = 0
        self._call_text = ""  # of the current call
        self._arguments = ""
        self._index = -1
        self._scanner = BracketScanner()
        self._parts: list[AnswerPart] = []
        self._state: State = self._read_header
        self._cut = False
        self.reasoning_chars = 0  # of the answer, up to the end of the last reasoning

    def feed(self, text: str) -> Sequence[AnswerPart]:
        self._text += text
        return self._run(final=False)

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        self._cut = cut
        parts = self._run(final=True)
        self._state = over
        return parts

    def _run(self, final: bool) -> Sequence[AnswerPart]:
        while self._state(final):
            pass
        parts, self._parts = self._parts, []
        return parts

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
            self._call_text, self._arguments, self._scanner = header, "", BracketScanner()
            call_id = make_call_id(name, self._index)
            self._parts.append(ToolCallStart(self._index, call_id, name))
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
            self._call_text += self._take(len(self._text) - len(self._text.lstrip()))
        if self._text and not self._arguments and not self._text.startswith("{"):
            return self._withdraw()
        piece = self._take(scanner.feed(self._text))
        self._call_text += piece
        self._arguments += piece
        if piece:
            self._add(ToolCallArguments(self._index, piece))
        if scanner.ended and _is_json(self._arguments):
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
        self._parts.append(ToolCallMalformed(self._index, self._call_text))
        self._state = self._read_content
        return True

    def _take(self, chars: int) -> str:
        taken, self._text = self._text[:chars], self._text[chars:]
        self._read_chars += chars
        return taken

    def _add(self, part: AnswerPart) -> None:
        match part:
            case Content("") | Reasoning(""):
                return
        add_part(self._parts, part)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True

"""Reads calls that have each argument as a tag with a key and a value, as the text arrives. Pure.

A value is text as it is, or JSON: the schema of the function says which. The text of a JSON value
ends where JSON does, so that its strings may contain the tags.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.readers.calls.parameters import find_parameter, is_text
from gateway.readers.calls.reader import CallReader
from gateway.readers.patterns import Pattern
from gateway.readers.scanning import JSON_PLAIN, BracketScanner, find_mark
from gateway.requests.incremental import count_overlap

# What some chat templates write in place of JSON's names.
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
PLAIN = JSON_PLAIN.union(*PYTHON_NAMES)


@dataclass(frozen=True)
class XmlCallSyntax:
    """A `CallSyntax`."""

    head: Pattern
    argument: Pattern  # up to the value of an argument, group `key`, or to the end of the call
    close: str  # the tag behind a value
    early: tuple[str, ...] = ()  # tags that end a value without `close`
    # A value may have a line feed on each side that is not part of it. Then it ends only at tags
    # that begin a line.
    in_lines: bool = False
    tells_text: bool = False  # the group `text` of an argument is `true` or `false`
    between: Pattern | None = None


class XmlCallReader(CallReader[XmlCallSyntax]):
    """A call without its end, or with other text between its arguments, is content."""

    def _begin_arguments(self, name: str) -> None:
        self._parameters: Mapping[str, object] = self._rules.tools[name].parameters
        self._count = 0  # arguments of the call

    def _read_arguments(self, final: bool) -> bool:
        """What precedes the value of an argument, or the end of the call."""
        found = self._syntax.argument.match(self._text, partial=True)
        if found is None or (found.partial and final and not self._cut):
            return self._withdraw()
        if found.partial:
            return False
        self._take(found.end())
        key = found.group("key")
        if key is None:
            self._add_arguments("}" if self._count else "{}")
            self._end_call()
            return True
        self._add_arguments(f"{', ' if self._count else '{'}{_write(key)}: ")
        self._count += 1
        told = found.group("text") if self._syntax.tells_text else None
        schema = find_parameter(self._parameters, key)
        text = is_text(schema, self._parameters) if told is None else told == "true"
        self._scanner, self._scanned = BracketScanner(plain=PLAIN), 0
        self._scanner.feed("[")  # the value is read as the item of a list
        self._state = self._read_text_start if text else self._read_json
        return True

    def _read_json(self, final: bool) -> bool:
        scanner, marks = self._scanner, (self._syntax.close, *self._syntax.early)
        if not (scanner.ended or scanner.failed):
            self._scanned += scanner.feed(self._text[self._scanned :])
        rest = self._text[self._scanned :]
        ended = scanner.failed and rest.startswith(marks)
        if not (ended or final or scanner.ended) and (
            not scanner.failed or any(mark.startswith(rest) for mark in marks)
        ):
            return False
        value = self._text[: self._scanned].strip()
        value = PYTHON_NAMES.get(value, value)
        if ended and _is_json(value):
            self._add_arguments(value)
            self._end_value(self._scanned)
        else:
            self._state = self._read_text_start
        return True

    def _end_value(self, chars: int) -> None:
        """Reads a value of so many characters, which are told, and its end."""
        self._take(chars)
        self._take(len(self._syntax.close) if self._text.startswith(self._syntax.close) else 0)
        self._state = self._read_arguments

    def _read_text_start(self, final: bool) -> bool:
        if not self._text and not final:
            return False
        self._add_arguments('"')
        self._marks = (self._syntax.close, *self._syntax.early)
        self._in_lines = self._syntax.in_lines and self._text.startswith("\n")
        if self._in_lines:
            self._marks = tuple(f"\n{mark}" for mark in self._marks)
        self._state = self._read_text
        return True

    def _read_text(self, final: bool) -> bool:
        at, mark = find_mark(self._text, self._marks)
        end = at if mark else len(self._text) - max(map(self._count_overlap, self._marks))
        if self._in_lines and end > 0:
            self._take(1)
            self._in_lines = False
            return True
        self._add_arguments(_write(self._take(end))[1:-1])
        if mark:
            self._add_arguments('"')
            self._end_value(len(mark) - len(mark.lstrip("\n")))
        elif final and not self._cut:
            return self._withdraw()
        return bool(mark)

    def _count_overlap(self, mark: str) -> int:
        return count_overlap(self._text, mark)


def _write(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")

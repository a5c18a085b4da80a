"""Reads calls that have their arguments as a JSON object, as the text arrives. Pure."""

import json
from collections.abc import Callable, Set
from dataclasses import dataclass

from gateway.readers.content import CallFinder, add_part
from gateway.readers.patterns import Pattern
from gateway.readers.scanning import BracketScanner
from gateway.types.answer_parts import ToolCallArguments, ToolCallMalformed, ToolCallStart

MakeId = Callable[[str, int], str]  # of a call, from the function's name and the call's index


@dataclass(frozen=True)
class JsonCallSyntax:
    """How a call is written. Each pattern ends with a fixed text: a match does not grow with more
    text."""

    head: Pattern  # up to the `{` of the arguments, its last character; group `name`
    tail: Pattern  # from the arguments to the end of the call
    # From a call to the next one, group `more`, or to the end of all; None: each has its mark.
    between: Pattern | None = None


class JsonCallReader(CallFinder):
    """Streams the arguments as they arrive. A call of a function that is not offered, and one that
    is not JSON, is content."""

    def __init__(
        self,
        begins: tuple[str, ...],
        bare: bool,
        syntaxes: tuple[JsonCallSyntax, ...],
        names: Set[str],
        parallel: bool,
        make_id: MakeId,
    ):
        super().__init__(begins, bare)
        self._syntaxes, self._syntax = syntaxes, syntaxes[0]
        self._names, self._parallel, self._make_id = names, parallel, make_id
        self._index = -1
        self._arguments = ""
        self._scanner = BracketScanner()

    def _read_call(self, final: bool) -> bool:
        """The head of a call."""
        waits = False
        for syntax in self._syntaxes:
            found = syntax.head.match(self._text, partial=not final)
            if found is not None and not found.partial:
                return self._start(syntax, found["name"], found.end() - 1)
            waits |= found is not None
        return self._reject_call() if final or not waits else False

    def _start(self, syntax: JsonCallSyntax, name: str, chars: int) -> bool:
        if name not in self._names:
            return self._reject_call()
        self._take(chars)
        self._index += 1
        call_id = self._make_id(name, self._index)
        self._parts.append(ToolCallStart(self._index, call_id, name))
        self._syntax, self._scanner, self._arguments = syntax, BracketScanner(), ""
        self._state = self._read_arguments
        return True

    def _read_arguments(self, final: bool) -> bool:
        scanner = self._scanner
        piece = self._take(scanner.feed(self._text))
        if piece:
            self._arguments += piece
            add_part(self._parts, ToolCallArguments(self._index, piece))
        if scanner.ended and _is_object(self._arguments):
            self._state = self._read_tail
            return True
        if scanner.ended or scanner.failed or (final and not self._cut):
            return self._withdraw()
        return False

    def _read_tail(self, final: bool) -> bool:
        found = self._syntax.tail.match(self._text, partial=True)
        if found is None:
            return self._withdraw()
        if found.partial and not final:
            return False
        self._take(found.end())
        self._end_call()
        if not self._parallel:
            self._state = self._skip_rest
        else:
            self._state = self._read_between if self._syntax.between else self._read_content
        return True

    def _read_between(self, final: bool) -> bool:
        assert self._syntax.between is not None
        found = self._syntax.between.match(self._text, partial=True)
        if found is not None and found.partial and not final:
            return False
        if found is not None:
            self._take(found.end())
        more = found is not None and found.group("more") is not None
        self._state = self._read_call if more else self._read_content
        if not more:
            self._call_text = ""
        return True

    def _withdraw(self) -> bool:
        self._parts.append(ToolCallMalformed(self._index, self._call_text))
        self._call_text, self._drops_blanks = "", False
        self._state = self._read_content
        return True


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

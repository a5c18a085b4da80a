"""Reads calls that have their arguments as a JSON object, as the text arrives. Pure."""

import json
from dataclasses import dataclass

from gateway.readers.calls.reader import CallReader
from gateway.readers.patterns import Pattern
from gateway.readers.scanning import BracketScanner


@dataclass(frozen=True)
class JsonCallSyntax:
    """A `CallSyntax`."""

    head: Pattern  # up to the arguments, of which `{` is the first character
    tail: Pattern  # from the arguments to the end of the call
    between: Pattern | None = None


class JsonCallReader(CallReader[JsonCallSyntax]):
    """A call with arguments that are not JSON is content."""

    def _begin_arguments(self, name: str) -> None:
        self._scanner, self._before = BracketScanner(), len(self._call)

    def _read_arguments(self, final: bool) -> bool:
        scanner = self._scanner
        self._add_arguments(self._take(scanner.feed(self._text)))
        if scanner.ended and _is_object("".join(self._call[self._before :])):
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
        return True


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

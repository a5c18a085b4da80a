"""Finding marks and ends in text that arrives in pieces. Pure."""

from collections.abc import Iterable

from gateway.requests.incremental import count_overlap

OPENING = {"{": "}", "[": "]", "(": ")"}
CLOSING = frozenset(OPENING.values())
JSON_PLAIN = frozenset("0123456789+-.eEtrufalsn \t\r\n:,")  # of JSON, outside strings and brackets


def find_mark(text: str, marks: Iterable[str]) -> tuple[int, str]:
    """Where the first of the marks begins, and which; -1 and nothing if there is none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, default=(-1, ""))


def count_held(text: str, marks: Iterable[str]) -> int:
    """Length of the end of a text that may become a mark, with the blanks before it."""
    held = max((count_overlap(text, mark) for mark in marks), default=0)
    rest = text[: len(text) - held]
    return len(text) - len(rest.rstrip())


class BracketScanner:
    """Finds the bracket that closes the first one of a text, outside of strings."""

    def __init__(self, quotes: str = '"', plain: frozenset[str] | None = JSON_PLAIN):
        """`plain`: the characters that are allowed outside strings and brackets; None: all."""
        self.ended = False
        self.failed = False
        self._quotes, self._plain = quotes, plain
        self._open: list[str] = []  # brackets that are to close
        self._quote = ""  # of the string that is open
        self._escaped = False

    def feed(self, text: str) -> int:
        """The number of characters up to the end, or to the first that cannot follow. O(text)."""
        for at, char in enumerate(text):
            if self._quote:
                self._in_string(char)
            elif char in self._quotes:
                self._quote = char
            elif char in OPENING:
                self._open.append(OPENING[char])
            elif char in CLOSING:
                if self._open.pop() != char:
                    self.failed = True
                    return at
                if not self._open:
                    self.ended = True
                    return at + 1
            elif self._plain is not None and char not in self._plain:
                self.failed = True
                return at
        return len(text)

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""

"""SLA outcomes of the last minute by class, counted per second. Pure."""

from collections import Counter, deque
from dataclasses import dataclass, field

from services.sla import SlaMissCause

WINDOW_S = 60


@dataclass(slots=True)
class SlaCounts:
    """Ended requests of one SLA class and their delivered tokens."""

    met: int = 0
    missed: dict[str, int] = field(default_factory=dict)  # by cause
    tokens: int = 0
    good_tokens: int = 0  # of requests that met their SLA

    def add(self, cause: SlaMissCause, requests: int, tokens: int) -> None:
        self.tokens += tokens
        if cause is SlaMissCause.NONE:
            self.met += requests
            self.good_tokens += tokens
        else:
            self.missed[cause.value] = requests


Key = tuple[str, SlaMissCause]


@dataclass(slots=True)
class Second:
    """What ended within one second of the owner's clock."""

    at_s: int
    requests: Counter[Key] = field(default_factory=Counter)
    tokens: Counter[Key] = field(default_factory=Counter)


class SlaWindow:
    """Outcomes of the last WINDOW_S seconds.

    Adding one is O(1), reading is O(classes x causes): sums are kept, and an expired second is
    subtracted from them.
    """

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque()
        self._requests: Counter[Key] = Counter()
        self._tokens: Counter[Key] = Counter()

    def add(
        self, name: str, cause: SlaMissCause, tokens: int, now_s: float, choices: int = 1
    ) -> None:
        """Choices of SLA class `name` have ended, with `tokens` delivered in total."""
        self._expire(now_s)
        if not self._seconds or self._seconds[-1].at_s < int(now_s):
            self._seconds.append(Second(int(now_s)))
        last, key = self._seconds[-1], (name, cause)
        for counts in (last.requests, self._requests):
            counts[key] += choices
        for counts in (last.tokens, self._tokens):
            counts[key] += tokens

    def by_class(self, now_s: float) -> dict[str, SlaCounts]:
        """The counts of each class that has any."""
        self._expire(now_s)
        by_class: dict[str, SlaCounts] = {}
        for (name, cause), requests in self._requests.items():
            by_class.setdefault(name, SlaCounts()).add(cause, requests, self._tokens[name, cause])
        return by_class

    def _expire(self, now_s: float) -> None:
        while self._seconds and self._seconds[0].at_s <= int(now_s) - WINDOW_S:
            expired = self._seconds.popleft()
            self._requests -= expired.requests  # drops counts of zero
            self._tokens -= expired.tokens

"""How the SLAs of the last minute were kept, by class, counted second by second. Pure."""

from collections import Counter, deque
from dataclasses import dataclass, field

from services.sla import SlaMissCause

WINDOW_S = 60


@dataclass(slots=True)
class Kept:
    """Of one SLA class: requests by how they ended, and the tokens that they were given."""

    met: int = 0
    missed: dict[str, int] = field(default_factory=dict)  # by the cause
    tokens: int = 0
    good_tokens: int = 0  # of those whose SLA was kept

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


class Recent:
    """Verdicts of the last WINDOW_S seconds, to the second.

    Adding one is O(1) and telling them O(classes x causes), however many there were: sums are
    kept, and a second that is over the edge is taken off them whole.
    """

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque()
        self._requests: Counter[Key] = Counter()
        self._tokens: Counter[Key] = Counter()

    def add(
        self, name: str, cause: SlaMissCause, tokens: int, now_s: float, choices: int = 1
    ) -> None:
        """Choices of SLA class `name` have ended with so many tokens delivered, all together."""
        self._forget(now_s)
        if not self._seconds or self._seconds[-1].at_s < int(now_s):
            self._seconds.append(Second(int(now_s)))
        last, key = self._seconds[-1], (name, cause)
        for counts in (last.requests, self._requests):
            counts[key] += choices
        for counts in (last.tokens, self._tokens):
            counts[key] += tokens

    def by_class(self, now_s: float) -> dict[str, Kept]:
        """Classes of which something ended, each with what became of its requests."""
        self._forget(now_s)
        kept: dict[str, Kept] = {}
        for (name, cause), requests in self._requests.items():
            kept.setdefault(name, Kept()).add(cause, requests, self._tokens[name, cause])
        return kept

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0].at_s <= int(now_s) - WINDOW_S:
            gone = self._seconds.popleft()
            self._requests -= gone.requests  # drops what comes to zero
            self._tokens -= gone.tokens

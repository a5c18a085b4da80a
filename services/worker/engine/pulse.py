"""Pulse: whether the engine's thread still handles commands. Pure."""

from collections.abc import Callable


class Pulse:
    """Of a thread that handles commands between two steps. `ask` sends it a call."""

    def __init__(self, ask: Callable[[Callable[[], None]], None]):
        self._ask = ask
        self._asked_s: float | None = None  # when the call was sent that it has not made yet

    def silent_s(self, now: float) -> float:
        """For how long the thread has not made the call; sends it again after that. O(1)."""
        if (asked_s := self._asked_s) is not None:
            return now - asked_s
        self._asked_s = now
        self._ask(self._answer)
        return 0.0

    def _answer(self) -> None:
        self._asked_s = None

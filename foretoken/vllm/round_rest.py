"""The rest between two rounds, which bounds their share of the time."""

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class RoundRest:
    """`share` of the time for rounds. One thread calls `timed` while none calls `is_over`.
    `observe` receives the seconds of each round."""

    def __init__(self, share: float, observe: Callable[[float], None]):
        self._share = share
        self._observe = observe
        self._until_s = 0.0

    def is_over(self, now: float) -> bool:
        return now >= self._until_s

    def timed(self, call: Callable[[], Result]) -> Result:
        """Calls it; then begins a rest in proportion to the time that it took. Its waits for the
        processor and the interpreter count: while a round runs, the steps wait for them as well."""
        began_s = time.monotonic()
        try:
            return call()
        finally:
            ended_s = time.monotonic()
            took_s = ended_s - began_s
            self._until_s = ended_s + took_s * (1 / self._share - 1)
            self._observe(took_s)

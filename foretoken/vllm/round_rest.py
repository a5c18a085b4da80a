"""The rest between two rounds, which bounds their share of a core."""

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class RoundRest:
    """`share` of a core for rounds. One thread calls `timed` while none calls `is_over`.
    `observe` receives the seconds of each round."""

    def __init__(self, share: float, observe: Callable[[float], None]):
        self._share = share
        self._observe = observe
        self._until_s = 0.0

    def is_over(self, now: float) -> bool:
        return now >= self._until_s

    def timed(self, call: Callable[[], Result]) -> Result:
        """Calls it; then begins a rest in proportion to the processor time that it took. The time
        in which it waited for the processor or the interpreter does not count: rounds would be
        rarer while other processes compute."""
        began_s, before_s = time.monotonic(), time.thread_time()
        try:
            return call()
        finally:
            ended_s, computed_s = time.monotonic(), time.thread_time() - before_s
            self._until_s = ended_s + computed_s * (1 / self._share - 1)
            self._observe(ended_s - began_s)

"""Times repeated calls on the CPU."""

import time
from collections.abc import Callable
from math import inf

from benchmarks.harness.report import Figure, figure

MIN_CALLS = 5


def time_calls(
    call: Callable[[int], object], repeats: int, warm_up: int = 0, limit_s: float = inf
) -> Figure:
    """Returns the milliseconds of `call(0)`, `call(1)`, … after `warm_up` calls that do not count.

    Stops before `repeats` when MIN_CALLS were timed and `limit_s` has passed.
    """
    for _ in range(warm_up):
        call(0)
    times_ms: list[float] = []
    began_s = time.perf_counter()
    for number in range(repeats):
        if len(times_ms) >= MIN_CALLS and time.perf_counter() - began_s >= limit_s:
            break
        started_s = time.perf_counter()
        call(number)
        times_ms.append((time.perf_counter() - started_s) * 1e3)
    return figure(times_ms)

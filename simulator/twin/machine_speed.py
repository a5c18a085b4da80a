"""The speed of a machine over time: on a shared machine, equal steps take different times."""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from services.costs import CostModel
from simulator.twin.step_ends import WorkerSteps

WINDOW_S = 0.25  # long enough for about twenty steps, short against an answer
MIN_STEPS = 5  # of a window; it grows to both sides until it has them


def measure_slowdown(
    steps: WorkerSteps, cost: CostModel, origin_s: float
) -> Callable[[float], float]:
    """Returns a function of a time on the run's clock: measured over modelled step time around it,
    including host time; 1 for a worker without steps. O(log steps) per call."""
    if not steps.timings:
        return lambda _: 1.0
    ends_s = (steps.ends_s() - origin_s).tolist()
    modelled = [
        cost.step_s(t.prefill_tokens, t.decode_seqs, t.context_tokens) for t in steps.timings
    ]
    host_s = steps.host_s
    measured = [timing.elapsed_s + host_s for timing in steps.timings]
    modelled_sum, measured_sum = (np.cumsum([0.0, *each]) for each in (modelled, measured))

    def slowdown(now: float) -> float:
        first = bisect_left(ends_s, now - WINDOW_S / 2)
        last = bisect_left(ends_s, now + WINDOW_S / 2)
        lacking = max(0, MIN_STEPS - (last - first))
        first, last = max(0, first - lacking), min(len(ends_s), last + lacking)
        return float(
            (measured_sum[last] - measured_sum[first]) / (modelled_sum[last] - modelled_sum[first])
        )

    return slowdown

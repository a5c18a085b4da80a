"""Which of the running requests is evicted first when a worker's memory runs out."""

from collections.abc import Callable

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import Bools, Columns


def newest(jobs: Columns, runs: Bools, key: Floats) -> Ints:
    """The latest admitted first (Past-Future, §2.4); of newly admitted ones the last."""
    admitted = np.where(runs, jobs.admitted, 0)
    entering = np.where(runs, 0, np.arange(1, len(runs) + 1))
    return np.lexsort((-admitted, -entering))


def least_urgent(jobs: Columns, runs: Bools, key: Floats) -> Ints:
    """The last of the order first."""
    return np.lexsort((-jobs.serial, -key))


def relief(jobs: Columns, runs: Bools, key: Floats) -> Ints:
    """The largest relief first: the expected final footprint times the expected remaining tokens;
    the latest admitted among equals."""
    relieved = (jobs.context + jobs.expected_remaining) * jobs.expected_remaining
    return np.lexsort((-jobs.serial, -relieved))


Victim = Callable[[Columns, Bools, Floats], Ints]
VICTIMS: dict[str, Victim] = {
    "newest": newest,
    "least_urgent": least_urgent,
    "relief": relief,
}

"""Who is evicted first when a worker's memory runs out."""

from collections.abc import Callable

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import Jobs


def newest(jobs: Jobs, key: Floats) -> Ints:
    """The latest admitted first (papers/000 §2.4)."""
    return np.argsort(-jobs.admitted, kind="stable")


def least_urgent(jobs: Jobs, key: Floats) -> Ints:
    """The last of the order first."""
    return np.lexsort((-jobs.serial, -key))


Victim = Callable[[Jobs, Floats], Ints]
VICTIMS: dict[str, Victim] = {"newest": newest, "least_urgent": least_urgent}

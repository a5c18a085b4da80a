"""What an order says of every job that waits or runs."""

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.memory import Memory


@dataclass(frozen=True, slots=True)
class Ranking:
    """Parallel to `rows`: the queued of the snapshot, then its running (from `split` on).

    `key` ascends by urgency. `line` is where a job stands in the line for a worker: its key, but
    for those that run, who stand ahead of whoever may not take their place; so standing lower in
    the line than one who does not fit without you is all there is to preemption. `remaining_s`
    is the fleet's time a job still takes, `lift_s` the time until waiting alone brings it to the
    front, and `next_s` when waiting alone next moves anybody.
    """

    rows: Ints
    split: int
    key: Floats
    line: Floats
    remaining_s: Floats
    lift_s: Floats
    next_s: float
    memory: Memory

    @property
    def queued(self) -> Ints:
        return self.rows[: self.split]


def sticky(key: Floats, split: int) -> Floats:
    """The line in which nobody who runs makes way."""
    line = key.copy()
    line[split:] = -np.inf
    return line

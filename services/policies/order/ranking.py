"""What an order says of every job that waits or runs."""

from dataclasses import dataclass
from math import inf

import numpy as np

from services.forecast import Floats, Ints
from services.policies.memory import PolicyMemory
from services.policies.parameters import Param
from services.policies.snapshot import Bools, Snapshot

CLASS = 1e7  # keys of one class of urgency lie within so much, in seconds longer than anybody waits

TICK_S = 1e-6  # a round that time calls for is not missed by rounding

# Who makes way must need more by this share; infinite: nobody makes way.
HYSTERESIS = {"hysteresis": Param(0.25, 0.0, inf)}


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
    queue_key: Floats
    remaining_s: Floats
    lift_s: Floats
    next_s: float
    memory: PolicyMemory

    @property
    def queued(self) -> Ints:
        return self.rows[: self.split]


def sticky(key: Floats, split: int) -> Floats:
    """The line in which nobody who runs makes way."""
    line = key.copy()
    line[split:] = -np.inf
    return line


def steady(key: Floats, passed: Floats, stays: Bools) -> Floats:
    """The line in which near-equal jobs do not trade places, as each trade costs a swap: only
    those ahead of where a running job would be passed (`passed`, parallel to the running) stand
    ahead of it. Those that `stays` says make way for nobody."""
    line = key.copy()
    split = len(key) - len(passed)
    line[split:] = np.where(stays, -inf, np.minimum(passed, key[split:]))
    return line


def fresh(snapshot: Snapshot) -> Bools:
    """Of the running: who has nothing in KV yet has only just come, and is passed by nobody."""
    none: Bools = snapshot.jobs.held[snapshot.running] == 0
    return none


def next_of(now: float, due_s: Floats) -> float:
    """When the first of these is due, of those that are not due yet; infinite without one."""
    later = now + due_s
    later = later[later > now]
    return float(later.min()) if len(later) else inf

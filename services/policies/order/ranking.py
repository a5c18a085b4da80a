"""`Ranking`: the result of an order for every queued or running request."""

from dataclasses import dataclass
from math import inf

import numpy as np

from services.forecast import Floats, Ints
from services.policies.memory import PolicyMemory
from services.policies.parameters import Param
from services.policies.snapshot import Bools, Snapshot

CLASS = 1e7  # keys of one urgency class span less than this, in seconds longer than any wait

TICK_S = 1e-6  # tolerance, so that rounding does not postpone a timed round

# A running request must need more by this share to be preempted. Infinite: none is.
HYSTERESIS = {"hysteresis": Param(0.25, 0.0, inf)}


@dataclass(frozen=True, slots=True)
class Ranking:
    """Parallel to `rows`: the snapshot's queued requests, then its running ones (from `split` on).

    `key` ascends by urgency. `queue_key` is the position in the line for a worker: the key, except
    that running requests stand ahead of those that may not preempt them. Preemption follows from
    it: a request is preempted if one ahead of it in the line does not fit otherwise. `remaining_s`
    is the fleet time a request still needs. `lift_s` is the time until waiting alone brings it to
    the front, and `next_s` the time of the next change by waiting alone.
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
    """Queue keys with which no running request is preempted."""
    line = key.copy()
    line[split:] = -np.inf
    return line


def steady(key: Floats, passed: Floats, stays: Bools) -> Floats:
    """Queue keys with which near-equal requests do not trade places, since each trade costs a swap.

    Only requests with a key below `passed` (parallel to the running ones) stand ahead of a running
    request. Requests of `stays` are not preempted.
    """
    line = key.copy()
    split = len(key) - len(passed)
    line[split:] = np.where(stays, -inf, np.minimum(passed, key[split:]))
    return line


def fresh(snapshot: Snapshot) -> Bools:
    """Running requests without KV, which were just admitted and are not preempted."""
    none: Bools = snapshot.jobs.held[snapshot.running] == 0
    return none


def next_of(now: float, due_s: Floats) -> float:
    """The earliest future time of these; infinite without one."""
    later = now + due_s
    later = later[later > now]
    return float(later.min()) if len(later) else inf

"""`Ranking`: the result of an order for every queued or running request."""

from dataclasses import dataclass
from math import inf

import numpy as np

from services.forecast import Floats, Ints
from services.policies.memory import PolicyMemory
from services.policies.parameters import Param
from services.policies.snapshot import Bools, Snapshot

CLASS = 1e7  # keys of one urgency class span less than this, in seconds longer than any wait

MANY = 2_048  # keys from which another sort than numpy's stable one pays
RUN = 3  # mean length of ascending runs from which it does not
SAMPLED = 64  # one of so many keys is compared with others to find out whether many are equal

TICK_S = 1e-6  # tolerance, so that rounding does not postpone a timed round

# A running request must need more by this share to be preempted. Infinite: none is.
HYSTERESIS = {"hysteresis": Param(0.25, 0.0, inf)}


@dataclass(frozen=True, slots=True)
class Ranking:
    """Parallel to `rows`: the snapshot's queued requests, then its running ones (from `split` on).

    `key` ascends by urgency. `queue_key` orders a worker's queue: it is the key, except that a
    running request precedes the requests that may not preempt it. Preemption follows from it: a
    request is preempted if one before it in the queue does not fit otherwise. `remaining_s` is the
    fleet time a request still needs. `lift_s` is the time until waiting alone brings it to the
    front, and `next_s` the time of the next change by waiting alone.
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


def sorted_order(key: Floats, serial: Ints) -> Ints:
    """The order by key, and by serial where keys are equal, as of `np.lexsort((serial, key))`.
    That sort is fast on long ascending runs and on few different keys; many others take a third of
    its time here."""
    count = len(key)
    if count < MANY or np.count_nonzero(key[1:] < key[:-1]) * RUN < count:
        return np.lexsort((serial, key))
    sample = np.sort(key[::SAMPLED])
    if (sample[1:] == sample[:-1]).any():
        return np.lexsort((serial, key))
    order = key.argsort()
    ascending = key[order]
    begins = np.ones(count, bool)  # a group of equal keys
    np.not_equal(ascending[1:], ascending[:-1], out=begins[1:])
    if begins.all():
        return order
    alone = begins.copy()
    alone[:-1] &= begins[1:]
    at = (~alone).nonzero()[0]
    tied = order[at]
    order[at] = tied[np.lexsort((serial[tied], begins.cumsum()[at]))]
    return order


def forbid_preemption(key: Floats, split: int) -> Floats:
    """Queue keys with which no running request is preempted."""
    queue_key = key.copy()
    queue_key[split:] = -np.inf
    return queue_key


def limit_preemption(
    snapshot: Snapshot, key: Floats, passed: Floats, stays: Bools | bool = False
) -> Floats:
    """Queue keys with which near-equal requests do not trade places, since each trade costs a swap.

    Only requests with a key below `passed` (parallel to the running ones) precede a running
    request. Requests of `stays` and those just admitted are not preempted.
    """
    queue_key, split = key.copy(), len(snapshot.queued)
    stays = stays | _is_just_admitted(snapshot)
    queue_key[split:] = np.where(stays, -inf, np.minimum(passed, key[split:]))
    return queue_key


def _is_just_admitted(snapshot: Snapshot) -> Bools:
    """Marks running requests without KV."""
    none: Bools = snapshot.jobs.held[snapshot.running] == 0
    return none


def earliest_s(now: float, due_s: Floats) -> float:
    """The earliest future time of these; infinite without one."""
    later = now + due_s
    later = later[later > now]
    return float(later.min()) if len(later) else inf

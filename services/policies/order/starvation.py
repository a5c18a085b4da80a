"""Bounded ageing: a request that has waited too long moves to the front, the oldest first.

Ageing that lifts every request of an overloaded system would turn the order into arrival order.
Instead, a request that has waited `ageing_s` without a break is starved until it ends, and may move
to the FRONT: the oldest first, one per worker at a time. Overload cannot exhaust that bound: it
costs the others one slot per worker, and a starved request with k older ones reaches the front
after k of them have been served. A request at the FRONT stays there until it has ended or lost its
KV, and is not preempted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order.ranking import CLASS, TICK_S, earliest_s
from services.policies.parameters import Param
from services.policies.snapshot import Bools, SelectedColumns, Snapshot, WorkerSnapshot

STARVED, FRONT = "starved", "front"

# A request that has waited this long moves to the front. Infinite: none does, and long requests may
# starve.
AGEING = {"ageing_s": Param(60.0, 1e-3, inf)}


@dataclass(frozen=True, slots=True)
class Starving:
    """Which requests are `starved`, which are at the `front`, the time until each gets there, and
    when waiting alone next starves a request; parallel to the live requests."""

    starved: Bools
    front: Bools
    lift_s: Floats
    next_s: float

    @property
    def columns(self) -> dict[str, Floats]:
        """The columns to remember."""
        return {STARVED: self.starved.astype(float), FRONT: self.front.astype(float)}


def find_starving(
    snapshot: Snapshot, split: int, memory: PolicyMemory, starved_s: float
) -> Starving:
    """State of the live requests, queued before `split`, where a wait of `starved_s` makes a
    request starved. O(jobs), and O(jobs · workers) while any is starved."""
    jobs = snapshot.live
    was_starved, was_front = memory.recall((STARVED, FRONT), jobs.rows, jobs.serial)
    waited_s = snapshot.now - jobs.since_s
    waited_s[split:] = -inf
    starved = (was_starved > 0) | (waited_s >= starved_s - TICK_S)
    front = was_front > 0
    if starved.any():
        front = _to_front(front, starved, jobs, split, snapshot.workers)
    crowded = bool((starved & ~front)[:split].any())  # waiting alone brings no request to the front
    lift_s = np.where(front, 0.0, inf if crowded else np.maximum(0.0, starved_s - waited_s))
    waits = ~front[:split]
    next_s = earliest_s(snapshot.now, starved_s - waited_s[:split][waits])
    return Starving(starved, front, lift_s, next_s)


def put_first(key: Floats, front: Bools, age_s: Floats) -> Floats:
    """Keys that put requests at the front before all others, the oldest first."""
    return np.where(front, -CLASS / 2 - np.minimum(age_s, CLASS / 4), key)


def _to_front(
    front: Bools,
    starved: Bools,
    jobs: SelectedColumns,
    split: int,
    workers: Sequence[WorkerSnapshot],
) -> Bools:
    """Moves one starved request per worker to the front. A request that runs there, or waits with
    KV there, stays at the front.

    A worker without one gets the oldest starved request with KV there. A request without KV can
    be placed anywhere, so that it moves to the front only while no worker of its model has one;
    younger requests do not pass it meanwhile. O(jobs · workers).
    """
    placed = jobs.held > 0
    placed[split:] = True
    front = front & placed
    waiting = starved & ~front
    waiting[split:] = False
    if not waiting.any():
        return front
    for model in {worker.model for worker in workers}:
        among = waiting & (jobs.model == model)
        without_kv = _oldest(among & ~placed, jobs)
        taken = set(jobs.home[front].tolist())
        here = [worker.number for worker in workers if worker.model == model]
        for number in here:
            oldest = (
                None if number in taken else _oldest(among & placed & (jobs.home == number), jobs)
            )
            if oldest is not None and (without_kv is None or _older(jobs, oldest, without_kv)):
                front[oldest] = True
                taken.add(number)
        if without_kv is not None and taken.isdisjoint(here):
            front[without_kv] = True
    return front


def _oldest(among: Bools, jobs: SelectedColumns) -> int | None:
    at = np.flatnonzero(among)
    return int(at[np.lexsort((jobs.serial[at], jobs.arrival_s[at]))[0]]) if len(at) else None


def _older(jobs: SelectedColumns, one: int, other: int) -> bool:
    return bool(jobs.arrival_s[one] <= jobs.arrival_s[other])

"""Bounded ageing: whoever has waited for too long comes to the front, the oldest first.

Ageing that brought everybody to the top of a system that stays overloaded would make the order
arrival's again. So who has waited for `ageing_s` at a stretch is starved, until it has ended, and
may go to the FRONT, the oldest first, one a worker at a time. That bound overload can't exhaust: it
costs the others one place, and whoever is starved comes there in the end: behind k older ones after
k of them have been served. Who is at the FRONT stays until it has ended or lost its KV, and makes
way for nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from services.forecast import Floats, Ints
from services.policies.memory import PolicyMemory
from services.policies.order.ranking import CLASS, TICK_S, next_of
from services.policies.parameters import Param
from services.policies.snapshot import Bools, RequestColumns, Snapshot, WorkerSnapshot

STARVED, FRONT = "starved", "front"

# Who has waited for so long comes to the front; infinite: nobody does, and the long may starve.
AGEING = {"ageing_s": Param(60.0, 1e-3, inf)}


@dataclass(frozen=True, slots=True)
class Starving:
    """Who is `starved`, who is at the `front`, the time until each gets there, and when waiting
    alone next starves anybody; parallel to the rows it was asked of."""

    starved: Bools
    front: Bools
    lift_s: Floats
    next_s: float

    @property
    def columns(self) -> dict[str, Floats]:
        """What is to be remembered of it."""
        return {STARVED: self.starved.astype(float), FRONT: self.front.astype(float)}


def starving(
    snapshot: Snapshot, rows: Ints, split: int, memory: PolicyMemory, starved_s: float
) -> Starving:
    """Of these, of whom those before `split` wait, once who waited `starved_s` is starved.
    O(jobs), and O(jobs · workers) while anybody starves."""
    jobs = snapshot.jobs
    was_starved, was_front = memory.recall((STARVED, FRONT), rows, jobs.serial[rows])
    waited_s = snapshot.now - jobs.since_s[rows]
    waited_s[split:] = -inf
    starved = (was_starved > 0) | (waited_s >= starved_s - TICK_S)
    front = was_front > 0
    if starved.any():
        front = _to_front(front, starved, jobs.select(rows), split, snapshot.workers)
    crowded = bool((starved & ~front)[:split].any())  # time alone brings nobody to the front
    lift_s = np.where(front, 0.0, inf if crowded else np.maximum(0.0, starved_s - waited_s))
    waits = ~front[:split]
    next_s = next_of(snapshot.now, starved_s - waited_s[:split][waits])
    return Starving(starved, front, lift_s, next_s)


def at_front(key: Floats, front: Bools, age_s: Floats) -> Floats:
    """Keys of which those at the front come before all others, the oldest first."""
    return np.where(front, -CLASS / 2 - np.minimum(age_s, CLASS / 4), key)


def _to_front(
    front: Bools,
    starved: Bools,
    jobs: RequestColumns,
    split: int,
    workers: Sequence[WorkerSnapshot],
) -> Bools:
    """Who runs at the front, or rests, keeps its worker's seat. The others go to the starved, the
    oldest first: each worker's to one that rests there; and as nobody knows yet where one without
    KV will be placed, that one comes in when all seats of its model are empty. It is not passed by
    younger ones meanwhile. O(jobs · workers)."""
    placed = jobs.held > 0
    placed[split:] = True
    front = front & placed
    waiting = starved & ~front
    waiting[split:] = False
    if not waiting.any():
        return front
    for model in {worker.model for worker in workers}:
        among = waiting & (jobs.model == model)
        roaming = _oldest(among & ~placed, jobs)
        taken = set(jobs.home[front].tolist())
        here = [worker.number for worker in workers if worker.model == model]
        for number in here:
            oldest = (
                None if number in taken else _oldest(among & placed & (jobs.home == number), jobs)
            )
            if oldest is not None and (roaming is None or _older(jobs, oldest, roaming)):
                front[oldest] = True
                taken.add(number)
        if roaming is not None and taken.isdisjoint(here):
            front[roaming] = True
    return front


def _oldest(among: Bools, jobs: RequestColumns) -> int | None:
    at = np.flatnonzero(among)
    return int(at[np.lexsort((jobs.serial[at], jobs.arrival_s[at]))[0]]) if len(at) else None


def _older(jobs: RequestColumns, one: int, other: int) -> bool:
    return bool(jobs.arrival_s[one] <= jobs.arrival_s[other])

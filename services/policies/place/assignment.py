"""Assigns queued requests to workers: filter by eligibility, score by load, pick."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from services.forecast import Floats, Ints
from services.policies.place.adapters import WAITS_FOR_ADAPTER, AdapterSlots
from services.policies.place.eligibility import (
    can_serve,
    can_serve_each,
    free_slots,
    select_placeable,
)
from services.policies.place.loads import Loads
from services.policies.snapshot import NOWHERE, Candidates

MIN_PART = 64  # requests that are looked at together


class Assignment:
    """The loads and free slots of the workers while requests are assigned one by one: those of the
    part that `look_at` names, by their place in it."""

    def __init__(self, loads: Loads, free: list[int]):
        self.spare = [i for i, slots in enumerate(free) if slots > 0]  # workers with a slot
        self.slots = sum(free)
        self._free = free
        self.loads: list[float] = loads.there.tolist()
        # The workers by load, as a heap; an entry with an earlier load is skipped.
        self._by_load = [(self.loads[i], i) for i in self.spare]
        heapify(self._by_load)

    def look_at(self, adds: Floats, scores: Floats) -> None:
        """Begins a part, given what `Loads.added` returns for it."""
        self._adds, self._scores = adds, scores
        alike = self._scores[:, :1] == self._scores
        self._alike: list[bool] = alike.all(axis=1).tolist()

    def take(self, nth: int, worker: int) -> None:
        """Assigns a request."""
        load = self.loads[worker] = self.loads[worker] + self._adds.item(nth, worker)
        replace = heapreplace if self._by_load[0][1] == worker else heappush
        replace(self._by_load, (load, worker))
        self._free[worker] -= 1
        self.slots -= 1
        if not self._free[worker]:
            self.spare = [i for i in self.spare if i != worker]

    def least(self, nth: int, turn: int, able: list[int]) -> int:
        """The worker with the least load and score together, the first among equals. O(able), and
        usually O(log workers) for a request that scores the same at every worker and may go to all
        with a slot."""
        if able is self.spare and self._alike[nth]:
            found = self._least_loaded(self._scores.item(nth, 0))
            if found != NOWHERE:
                return found
        there, scores = self.loads, self._scores[nth].tolist()
        return min(able, key=lambda i: there[i] + scores[i])

    def _least_loaded(self, score: float) -> int:
        """The worker with the least sum of load and this score; NOWHERE if another worker's may be
        equal, because of rounding."""
        entries = self._by_load
        while not self._free[entries[0][1]] or entries[0][0] < self.loads[entries[0][1]]:
            heappop(entries)
        load, worker = entries[0]
        for other, _ in entries[1:3]:
            if other + score <= load + score:
                return NOWHERE
        return worker

    def next_in_turn(self, nth: int, turn: int, able: list[int]) -> int:
        return able[turn % len(able)]


# Picks one of the able workers (indices); `turn` counts requests and rounds.
Pick = Callable[[Assignment, int, int, list[int]], int]


def assign(
    candidates: Candidates,
    at: Ints,
    measure_loads: Callable[[], Loads],
    pick: Pick = Assignment.least,
    longest_first: bool = False,
) -> Ints:
    """The worker number of every row, NOWHERE without a slot, WAITS_FOR_ADAPTER without one for its
    adapter. `at` has the numbers of rows that already have a worker.

    The others follow in order, or with `longest_first` those for which slots exist, the least
    flexible first and the longest first among equals (SCLS' max-min). A worker takes at most as
    many as it has slots that are free or held by requests behind the first waiting one. With a
    single worker nothing is scored. O(waiting · workers), over at most those slots.
    """
    workers, at = candidates.workers, at.copy()
    fresh = (at == NOWHERE).nonzero()[0]
    if not len(fresh) or not workers:
        return at
    adapters = AdapterSlots(candidates, at)
    free = free_slots(candidates)
    if len(workers) == 1:
        able = fresh[can_serve(candidates, workers[0], fresh)]
        at[able] = WAITS_FOR_ADAPTER
        able = adapters.admit(able, 0)
        at[able] = NOWHERE
        at[able[: free[0]]] = workers[0].number
        return at
    loads = measure_loads()
    added: tuple[Floats, Floats] | None = None
    if longest_first:
        waits = adapters.must_wait(fresh, free)  # these would hide others that find a slot
        at[fresh[waits]] = WAITS_FOR_ADAPTER
        fresh, grades = select_placeable(candidates, workers, free, fresh[~waits])
        adds, scores = loads.added(fresh)
        order = np.lexsort((-adds.min(axis=1), -grades))
        fresh, added = fresh[order], (adds[order], scores[order])
    assignment, first = Assignment(loads, free), 0
    while assignment.slots and first < len(fresh):  # parts: most of a long queue finds no slot
        part = slice(first, first + max(assignment.slots, MIN_PART))
        rows = fresh[part]
        assignment.look_at(*((added[0][part], added[1][part]) if added else loads.added(rows)))
        able_rows = can_serve_each(candidates, workers, rows)
        everywhere = np.logical_and.reduce(able_rows, axis=1).tolist()
        for nth in range(len(rows)):
            able = assignment.spare
            if not able:
                break
            if not everywhere[nth]:
                able = [i for i in able if able_rows[nth, i]]
            row = int(rows[nth])
            if wanted := adapters.narrow(row, able, assignment.loads):
                chosen = pick(assignment, nth, candidates.round + first + nth, wanted)
                at[row] = workers[chosen].number
                assignment.take(nth, chosen)
                adapters.take(row, chosen)
            elif able:
                at[row] = WAITS_FOR_ADAPTER
        first += len(rows)
    return at

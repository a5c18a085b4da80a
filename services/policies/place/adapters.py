"""Which waiting requests may run, where workers compute few LoRA adapters at a time. Pure.

A waiting request goes to a worker that runs requests of its adapter, or that has a free slot for
it. Without either it waits for one turn of the worker's adapters. Then it is admitted, and the
worker's adapters take turns (services/worker/requests/adapter_slots.py), so that it does not wait
for the end of the others' answers.
"""

from collections.abc import Sequence

import numpy as np

from services.forecast import Floats, Ints
from services.policies.place.eligibility import can_serve_each
from services.policies.snapshot import NOWHERE, Bools, Candidates, distinct

WAITS_FOR_ADAPTER = -2  # in place of a worker: no slot is free for the request's adapter
# An adapter takes a slot of a further worker if those that have it have so many times the load.
SPREAD_LOAD = 2.0


class AdapterSlots:
    """The adapters in use at each worker while requests are assigned. Workers are indices, and
    requests positions among the candidates."""

    def __init__(self, candidates: Candidates, at: Ints):
        """`at` has the worker's number of each request that has one already."""
        self._candidates, self._workers = candidates, candidates.workers
        self._limited = _is_limited(candidates)
        self._used: list[set[int]] = []
        if self._limited:
            self._used = [set() for _ in self._workers]
            there = (at > NOWHERE).nonzero()[0]
            workers = candidates.indices_of(at[there])
            for row, worker in zip(there.tolist(), workers.tolist(), strict=True):
                if worker != NOWHERE:
                    self.take(row, worker)

    def narrow(self, row: int, able: list[int], loads: Sequence[float]) -> list[int]:
        """Those of the able workers to which a request may go; empty while it waits for a slot.
        O(able)."""
        adapter = self._adapter(row)
        if not adapter:
            return able
        using = [i for i in able if not self._slots(i) or adapter in self._used[i]]
        others = (i for i in able if len(self._used[i]) < self._slots(i))
        free = [i for i in others if adapter not in self._used[i]]
        if using and free:
            most = SPREAD_LOAD * min(loads[i] for i in free)
            return [i for i in using if loads[i] <= most] or free
        return using or free or [i for i in able if self._is_overdue(row, i)]

    def take(self, row: int, worker: int) -> None:
        """Counts a request's adapter at its worker."""
        if adapter := self._adapter(row):
            self._used[worker].add(adapter)

    def admit(self, rows: Ints, worker: int) -> Ints:
        """Those of the requests, in their order, that need not wait for a slot of this worker. They
        take their slots. O(requests)."""
        if not self._limited:
            return rows
        admitted, loads = [], [0.0] * len(self._workers)
        for row in rows.tolist():
            if self.narrow(row, [worker], loads):
                self.take(row, worker)
                admitted.append(row)
        return np.array(admitted, np.int64)

    def must_wait(self, rows: Ints, free: Sequence[int]) -> Bools:
        """Which of the requests wait for a slot at every worker that could run them, as the slots
        are now. `free`: how many more requests each worker may run. O(requests · workers) if slots
        are scarce."""
        waits = np.zeros(len(rows), bool)
        if not self._limited:
            return waits
        able = can_serve_each(self._candidates, self._workers, rows) & (np.array(free) > 0)
        loads = [0.0] * len(self._workers)
        for nth in self._candidates.jobs.adapter[rows].nonzero()[0].tolist():
            here = able[nth].nonzero()[0].tolist()
            waits[nth] = bool(here) and not self.narrow(int(rows[nth]), here, loads)
        return waits

    def _adapter(self, row: int) -> int:
        """0 for a request that needs no slot."""
        return int(self._candidates.jobs.adapter[row]) if self._limited else 0

    def _slots(self, worker: int) -> int:
        """0: the worker has no limit."""
        return self._workers[worker].adapter_slots

    def _is_overdue(self, row: int, worker: int) -> bool:
        waited_s = self._candidates.now - float(self._candidates.jobs.since_s[row])
        return waited_s >= self._workers[worker].adapter_turn_s


def slots_in_use(candidates: Candidates, rows: Ints) -> tuple[Floats, Floats]:
    """For each of these requests, the adapters of requests of its model that run or have KV, and
    the slots of the workers of that model. O(candidates · models)."""
    jobs, in_use, slots = candidates.jobs, np.zeros(len(rows)), np.zeros(len(rows))
    present = (candidates.is_running | candidates.is_paused_with_kv()) & (jobs.adapter != 0)
    for model in distinct(jobs.model[rows]):
        mine = jobs.model[rows] == model
        in_use[mine] = len(distinct(jobs.adapter[present & (jobs.model == model)]))
        serving = (worker for worker in candidates.workers if worker.model == model)
        slots[mine] = sum(worker.adapter_slots for worker in serving)
    return in_use, slots


def _is_limited(candidates: Candidates) -> bool:
    """Whether a worker has fewer slots than the candidates have adapters. O(candidates) if a worker
    has any."""
    slots = [worker.adapter_slots for worker in candidates.workers if worker.adapter_slots]
    if not slots:
        return False
    adapters = distinct(candidates.jobs.adapter)
    return len(adapters) - (0 in adapters) > min(slots)

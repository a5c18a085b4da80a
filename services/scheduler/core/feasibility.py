"""Predicts once per request whether its first token will meet its TTFT budget. Only a metric uses
the result; no decision does.

The prediction is made in the first round that sees the request: the work ahead of it in the queue
over its model's workers (none if it is admitted at once), then its prefill on the fastest of them.
Ageing may bring it to the front sooner. Requests that run now and end meanwhile are not counted.
"""

from math import inf

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import Decision
from services.policies.order.ranking import Ranking
from services.policies.snapshot import Snapshot, distinct
from services.scheduler.core.admission import fastest_prefill_s

CELLS = 4_096  # of keys when positions among them are looked up
LEAST_SPREAD = 1e-6  # of these keys; without any, all would be in one cell
_NO_ROWS: Ints = np.zeros(0, np.int64)


class FeasibilityCheck:
    """Finds requests expected to miss their TTFT budget: `update` takes each round's ranking, then
    `pop_late` its decision."""

    def __init__(self) -> None:
        self._seen: Ints = _NO_ROWS  # by row, the serial of the request that was seen there
        self._rows: Ints = _NO_ROWS  # new requests with a TTFT budget
        self._serials: Ints = _NO_ROWS
        self._waits_s: Floats = np.zeros(0)  # work ahead of each of these
        self._spare_s: Floats = np.zeros(0)  # its budget less its prefill

    def update(self, snapshot: Snapshot, ranking: Ranking) -> None:
        """O(queued), and O(jobs log new) if there are new requests; vectorised."""
        self._rows = _NO_ROWS
        if not snapshot.workers or not ranking.split:
            return  # the first round with a worker makes the prediction
        at = self._new(snapshot, ranking)
        if not len(at):
            return
        jobs, rows = snapshot.jobs, ranking.rows[at]
        waits_s, prefill_s = np.zeros(len(at)), np.full(len(at), -inf)
        for model in distinct(jobs.model[rows]):
            workers = tuple(worker for worker in snapshot.workers if worker.model == model)
            if workers:
                mine = np.flatnonzero(jobs.model[rows] == model)
                share = np.zeros(len(ranking.rows))
                share[: ranking.split] = (jobs.model[ranking.queued] == model) / len(workers)
                lift_s = np.maximum(ranking.lift_s[at[mine]], 0.0)
                waits_s[mine] = np.minimum(work_ahead_s(ranking, at[mine], share), lift_s)
                prefill_s[mine] = fastest_prefill_s(workers, jobs.prompt[rows[mine]])
        self._rows, self._serials, self._waits_s = rows, jobs.serial[rows], waits_s
        due_s = jobs.arrival_s[rows] + jobs.ttft_s[rows]
        self._spare_s = due_s - snapshot.now - prefill_s

    def pop_late(self, decision: Decision, serial: Ints) -> list[int]:
        """Rows that are expected to miss their TTFT budget, each once. `serial` is the board's
        current column."""
        if not len(self._rows):
            return []
        runs = np.zeros(len(serial), bool)
        for share in decision.workers:
            runs[share.run] = True
        enters = runs[self._rows]
        late = self._spare_s < np.where(enters, 0.0, self._waits_s)
        here = serial[self._rows] == self._serials
        rows: list[int] = self._rows[late & here].tolist()
        self._rows = _NO_ROWS
        return rows

    def _new(self, snapshot: Snapshot, ranking: Ranking) -> Ints:
        """Positions in the ranking of queued requests seen for the first time that have a budget
        and no output."""
        jobs, rows = snapshot.jobs, ranking.queued
        serials = snapshot.live.serial[: len(rows)]
        if len(self._seen) < len(jobs):
            more = np.zeros(len(jobs) - len(self._seen), np.int64)
            self._seen = np.concatenate([self._seen, more])
        new = (self._seen[rows] != serials).nonzero()[0]
        fresh = rows[new]
        self._seen[fresh] = jobs.serial[fresh]
        budgeted: Ints = new[(jobs.ttft_s[fresh] < inf) & (jobs.output[fresh] == 0)]
        return budgeted


def work_ahead_s(ranking: Ranking, at: Ints, share: Floats) -> Floats:
    """The remaining time of everything ahead of these positions, each entry weighted by its share.
    Positions come in any order, each once. O(jobs log positions)."""
    order = np.argsort(ranking.key[at], kind="stable")
    mine, key = at[order], ranking.key
    keys = key[mine]
    ahead = np.empty(len(key), np.int64)  # how many of these positions each entry is ahead of less
    ahead[mine] = keys.searchsorted(keys, side="right")  # fast, because they ascend
    counts = (share > 0) & (key < keys[-1])
    others = counts.copy()
    others[mine] = False
    rest = others.nonzero()[0]
    ahead[rest] = _count_upto(keys, key[rest])
    at_all = counts.nonzero()[0]
    takes_s = np.bincount(ahead[at_all], ranking.remaining_s[at_all] * share[at_all], len(at) + 1)
    waits_s = np.empty(len(at))
    waits_s[order] = np.cumsum(takes_s.astype(float))[:-1]
    return waits_s


def _count_upto(keys: Floats, values: Floats) -> Ints:
    """How many of the ascending keys are at most each value, which is at most the last key.

    Values are first put into cells of equal width, which keep their order. Where no key is in a
    cell, all its values have the same count; only the others are searched.
    """
    low, high = float(keys[0]), float(keys[-1])
    if len(values) < CELLS or not LEAST_SPREAD <= high - low < np.inf:
        return keys.searchsorted(values, side="right")
    scale = CELLS / (high - low)

    def cell(numbers: Floats) -> Ints:
        return np.clip((numbers - low) * scale, -1.0, CELLS).astype(np.int64) + 1

    many = np.bincount(cell(keys), minlength=CELLS + 2)
    upto, at = many.cumsum(), cell(values)
    found = upto[at]
    crowded = (many > 0)[at].nonzero()[0]
    found[crowded] = keys.searchsorted(values[crowded], side="right")
    return found

"""Outlook: of each request, once, whether its first token is foreseen to come in time.

When a round first looks at it: after the time that all before it in the queue still take the
workers of its model, none where it goes in at once, and its own prefill on the fastest of them.
Ageing may bring it to the front sooner, and those who run now, and end meanwhile, are not waited
for. Nothing is decided by it: it is counted.
"""

from math import inf

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import Decision
from services.policies.order.ranking import Ranking
from services.policies.snapshot import Snapshot, WorkerSnapshot

_NOBODY: Ints = np.zeros(0, np.int64)


class Outlook:
    """`look` at each round's line, then ask who of it will be `late`, given what was decided."""

    def __init__(self) -> None:
        self._seen: Ints = _NOBODY  # by row, the serial of who was looked at
        self._rows: Ints = _NOBODY  # whose first look it is, and who have a budget
        self._serials: Ints = _NOBODY
        self._waits_s: Floats = np.zeros(0)  # what goes before each of these
        self._spare_s: Floats = np.zeros(0)  # of its budget, were it prefilled at once

    def look(self, snapshot: Snapshot, ranking: Ranking) -> None:
        """O(queued), and O(jobs log new) where somebody is new, vectorised."""
        self._rows = _NOBODY
        if not snapshot.workers:
            return  # nothing is known of when there will be
        at = self._new(snapshot, ranking)
        if not len(at):
            return
        jobs, rows = snapshot.jobs, ranking.rows[at]
        waits_s, prefill_s = np.zeros(len(at)), np.full(len(at), -inf)
        for model in np.unique(jobs.model[rows]).tolist():
            workers = [worker for worker in snapshot.workers if worker.model == model]
            if workers:
                mine = np.flatnonzero(jobs.model[rows] == model)
                share = np.zeros(len(ranking.rows))
                share[: ranking.split] = (jobs.model[ranking.queued] == model) / len(workers)
                lift_s = np.maximum(ranking.lift_s[at[mine]], 0.0)
                waits_s[mine] = np.minimum(ahead_s(ranking, at[mine], share), lift_s)
                prefill_s[mine] = _prefill_s(workers, jobs.prompt[rows[mine]])
        self._rows, self._serials, self._waits_s = rows, jobs.serial[rows], waits_s
        due_s = jobs.arrival_s[rows] + jobs.ttft_s[rows]
        self._spare_s = due_s - snapshot.now - prefill_s

    def late(self, decision: Decision, serial: Ints) -> list[int]:
        """Rows of those who will not have their first token in time; `serial` is the board's by
        now. Each is told once."""
        if not len(self._rows):
            return []
        runs = [share.run for share in decision.workers]
        enters = np.isin(self._rows, np.concatenate([_NOBODY, *runs]))
        late = self._spare_s < np.where(enters, 0.0, self._waits_s)
        here = serial[self._rows] == self._serials
        rows: list[int] = self._rows[late & here].tolist()
        self._rows = _NOBODY
        return rows

    def _new(self, snapshot: Snapshot, ranking: Ranking) -> Ints:
        """Where those stand in the line who have a budget, no token, and were not seen before."""
        jobs, rows = snapshot.jobs, ranking.queued
        if len(self._seen) < len(jobs):
            more = np.zeros(len(jobs) - len(self._seen), np.int64)
            self._seen = np.concatenate([self._seen, more])
        new = np.flatnonzero(self._seen[rows] != jobs.serial[rows])
        fresh = rows[new]
        self._seen[fresh] = jobs.serial[fresh]
        budgeted: Ints = new[(jobs.ttft_s[fresh] < inf) & (jobs.output[fresh] == 0)]
        return budgeted


def _prefill_s(workers: list[WorkerSnapshot], prompt: Ints) -> Floats:
    """Of prompts, alone, on the fastest."""
    base_s = min(worker.cost.base_s for worker in workers)
    token_s = min(worker.cost.prefill_token_s for worker in workers)
    return np.asarray(base_s + token_s * prompt, float)


def ahead_s(ranking: Ranking, at: Ints, share: Floats) -> Floats:
    """The time that all before each of these, which come in any order, still take: of everybody
    their share. O(jobs log these)."""
    order = np.argsort(ranking.key[at], kind="stable")
    ahead = np.searchsorted(ranking.key[at[order]], ranking.key, side="right")
    takes_s = np.bincount(ahead, ranking.remaining_s * share, len(at) + 1)
    waits_s = np.empty(len(at))
    waits_s[order] = np.cumsum(takes_s.astype(float))[:-1]
    return waits_s

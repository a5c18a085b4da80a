"""Batch membership of requests: carried from round to round, updated within one.

Values only: each update returns a new state, so that a round is a chain of functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import Bools, Candidates

LAST_ID = "batch_last_id"  # the last batch id given out
LAST_WORKER = "batch_last_worker"  # the number of the worker that took the last batch in turn
NOTES = ("batch", "worker", "closed", "sent", "serve_s", "evictions")


@dataclass(frozen=True, slots=True)
class BatchState:
    """Columns parallel to the candidates; positions below are positions in them.

    `batch` is a batch id, 0 in the pool. `worker` is the number of the worker that the batch waits
    for or was sent to, 0 for any. A `closed` batch takes no more requests. A `sent` request was
    given to its worker. `serve_s` is the batch's estimated time there; it stays as it was at
    dispatch, so that no error accumulates in a load (SCLS, §4.5). `paused` requests run and return
    to the pool. `begins` maps a worker's index to the positions that it begins in this round.
    """

    batch: Ints
    worker: Ints
    closed: Bools
    sent: Bools
    serve_s: Floats
    paused: Bools
    last_id: int = 0
    last_worker: int = 0
    begins: Mapping[int, Ints] = field(default_factory=dict)

    def updated(self, at: Ints, **values: Any) -> "BatchState":
        """A copy with these columns set at positions `at`."""
        columns: dict[str, Any] = {name: getattr(self, name).copy() for name in values}
        for name, value in values.items():
            columns[name][at] = value
        return replace(self, **columns)

    def new_ids(self, count: int) -> tuple["BatchState", Ints]:
        """`count` unused batch ids."""
        last = self.last_id + count
        return replace(self, last_id=last), np.arange(self.last_id + 1, last + 1)

    def notes(self, candidates: Candidates) -> dict[str, Floats]:
        """What the next round recalls."""
        columns = (self.batch, self.worker, self.closed, self.sent, self.serve_s)
        kept = (*columns, candidates.jobs.evictions)
        return {name: column.astype(float) for name, column in zip(NOTES, kept, strict=True)}


def recall_state(candidates: Candidates, returns: bool, splits: bool) -> BatchState:
    """The state at the start of a round.

    With `returns`, a request that has used up its slice goes back to the pool. So does a request
    that was sent and waits again, because its worker was lost or had no free slot. With `splits`, a
    batch that ran out of memory is split into two closed halves, which wait again together with
    the members that still run (Magnus, §III-C).
    """
    waits, jobs = ~candidates.is_running, candidates.jobs
    sent = candidates.noted("sent") > 0
    evicted = waits & sent & (jobs.evictions > candidates.noted("evictions"))
    exhausted = jobs.slice_exhausted if returns else np.zeros(len(waits), bool)
    state = BatchState(
        candidates.noted("batch").astype(np.int64),
        candidates.noted("worker").astype(np.int64),
        candidates.noted("closed") > 0,
        sent,
        candidates.noted("serve_s"),
        candidates.is_running & exhausted,
        int(candidates.numbers.get(LAST_ID, 0)),
        int(candidates.numbers.get(LAST_WORKER, 0)),
    )
    back = state.paused | (waits & sent)
    if splits:
        for broken in np.unique(state.batch[evicted & (state.batch > 0)]).tolist():
            members = np.flatnonzero(state.batch == broken)
            paused = state.paused[members] | candidates.is_running[members]
            state = _split(state.updated(members, paused=paused), members)
            back[members] = False
    rows = np.flatnonzero(back)
    state = state.updated(rows, batch=0, worker=0, closed=False, sent=False, serve_s=0.0)
    numbers = np.array([worker.number for worker in candidates.workers], np.int64)
    lost = np.flatnonzero(waits & ~np.isin(state.worker, numbers))
    return state.updated(lost, worker=0, serve_s=0.0)


def _split(state: BatchState, members: Ints) -> BatchState:
    half = (len(members) + 1) // 2
    for part in (members[:half], members[half:]):
        if len(part):
            state, ids = state.new_ids(1)
            state = state.updated(part, batch=ids)
    return state.updated(members, closed=True, sent=False, worker=0, serve_s=0.0)

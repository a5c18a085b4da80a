"""What is known of batches from one round to the next, and what has come of them since."""

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import Bools, Candidates

NEXT = "batch_next"  # the last id that was given
NOTES = ("batch", "seat", "closed", "sent", "serve_s", "evictions")


@dataclass(slots=True)
class BatchState:
    """Columns parallel to the contest, changed while a round is arranged.

    `batch` is the id, 0 in the pool; `seat` the worker it waits for or was sent to, 0 for any;
    `closed`: nobody may be added to it; `sent`: it was given to its worker. `serve_s` is what it is
    estimated to take there, the same from when it was sent until it is over, so that no error
    builds up in a load (papers/003 §4.5). `paused` run and go back to the pool. `last` is the
    last id given.
    """

    batch: Ints
    seat: Ints
    closed: Bools
    sent: Bools
    serve_s: Floats
    paused: Bools
    last: int

    def new_ids(self, count: int) -> Ints:
        self.last += count
        return np.arange(self.last - count + 1, self.last + 1)

    def notes(self, contest: Candidates) -> dict[str, Floats]:
        """To be remembered."""
        columns = (self.batch, self.seat, self.closed, self.sent, self.serve_s)
        kept = (*columns, contest.jobs.evictions)
        return {name: column.astype(float) for name, column in zip(NOTES, kept, strict=True)}


def recalled(contest: Candidates, returns: bool, splits: bool) -> BatchState:
    """As it stands now.

    Where slices `return`, whoever has made its own goes back to the pool; so does whoever was sent
    and waits again, its worker being gone or having had no place. Where memory ran out in a batch
    and it `splits`, its members wait again in two halves that nobody can be added to, those that
    still run with the rest (papers/004 §III-C).
    """
    waits, jobs = ~contest.is_running, contest.jobs
    batch = contest.noted("batch").astype(np.int64)
    sent = contest.noted("sent") > 0
    evicted = waits & sent & (jobs.evictions > contest.noted("evictions"))
    standing = BatchState(
        batch,
        contest.noted("seat").astype(np.int64),
        contest.noted("closed") > 0,
        sent,
        contest.noted("serve_s").copy(),
        contest.is_running & jobs.slice_exhausted if returns else np.zeros(len(waits), bool),
        int(contest.numbers.get(NEXT, 0)),
    )
    back = standing.paused | (waits & sent)
    if splits:
        for broken in np.unique(batch[evicted & (batch > 0)]).tolist():
            members = np.flatnonzero(batch == broken)
            standing.paused[members] |= contest.is_running[members]
            back[members] = False
            _split(standing, members)
    _forget(standing, back)
    numbers = np.array([worker.number for worker in contest.workers], np.int64)
    lost = waits & ~np.isin(standing.seat, numbers)
    standing.seat[lost] = 0
    standing.serve_s[lost] = 0.0
    return standing


def _split(standing: BatchState, members: Ints) -> None:
    half = (len(members) + 1) // 2
    for part in (members[:half], members[half:]):
        if len(part):
            standing.batch[part] = standing.new_ids(1)
    standing.closed[members] = True
    standing.sent[members] = False
    standing.seat[members] = 0
    standing.serve_s[members] = 0.0


def _forget(standing: BatchState, rows: Bools) -> None:
    standing.batch[rows] = 0
    standing.seat[rows] = 0
    standing.closed[rows] = standing.sent[rows] = False
    standing.serve_s[rows] = 0.0

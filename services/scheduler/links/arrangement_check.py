"""What is wrong with a batcher's answer: nothing it says is carried out unless it could be ours."""

import numpy as np
from numpy.typing import NDArray

from services.forecast import Ints
from services.policies.decision import WaitReason
from services.policies.interval import MAX_INTERVAL_S
from services.policies.snapshot import Bools, Candidates, WorkerSnapshot
from services.scheduler.core.events import Arranged, Portion

Numbers = tuple[int, ...]
REASONS = frozenset(int(reason) for reason in WaitReason)


def flaw(contest: Candidates, arranged: Arranged) -> str:
    """A sentence on the first thing that can't be; empty when there is none."""
    portions = arranged.portions or ()
    if not arranged.next_s > contest.now:
        return f"the next round is due at {arranged.next_s:g}, not after {contest.now:g}"
    if not arranged.not_before_s <= contest.now + MAX_INTERVAL_S:
        return f"no round before {arranged.not_before_s:g}: longer than {MAX_INTERVAL_S:g} s"
    seats = {worker.number: worker for worker in contest.workers}
    if sorted(portion.worker for portion in portions) != sorted(seats):
        return "not one portion for each worker"
    board = _Rows(contest.rows)
    for portion in portions:
        what = _flaw_of(portion, seats[portion.worker], contest, board)
        if what:
            return f"worker {portion.worker}: {what}"
    if any(len(column) != len(contest.rows) for column in arranged.notes.values()):
        return "notes what is not one number for each row"
    if any(each.reason not in REASONS for each in arranged.explanations):
        return "gives a reason that is not known here"
    entering = [row for portion in portions for row in portion.run]
    if len(set(entering)) < len(entering):
        return "a row runs twice"
    waits = arranged.next_s <= contest.now + MAX_INTERVAL_S
    if not entering and not waits and not contest.is_running.any() and _could_run(contest).any():
        return "nobody runs, though somebody could"
    return ""


class _Rows:
    """Finds the board's rows in a contest."""

    def __init__(self, rows: Ints):
        self._order = np.argsort(rows)
        self._sorted = rows[self._order]

    def at(self, rows: Numbers) -> Ints | None:
        """Their places in the contest; None unless all are there."""
        asked = np.array(rows, np.int64)
        place = np.searchsorted(self._sorted, asked)
        if len(asked) and (int(place.max()) == len(self._sorted)):
            return None
        return self._order[place] if np.array_equal(self._sorted[place], asked) else None


def _flaw_of(portion: Portion, worker: WorkerSnapshot, contest: Candidates, board: _Rows) -> str:
    run, pause, victims = (board.at(r) for r in (portion.run, portion.pause, portion.victims))
    if run is None or pause is None or victims is None:
        return "names a row that was not in the contest"
    jobs = contest.jobs
    here = contest.is_running & (jobs.home == worker.number)
    elsewhere = contest.is_running & ~here
    if elsewhere[run].any() or not here[pause].all():
        return "moves or pauses one that does not run there"
    if np.isin(pause, run).any():
        return "pauses one that is to run"
    if len(set(portion.victims)) < len(victims) or not np.isin(victims, run).all():
        return "names victims that are not to run"
    if not (here | _able(contest, worker))[run].all():
        return "runs one that it could not hold"
    if len(portion.limits) != len(run):
        return f"{len(portion.limits)} limits for {len(run)} rows"
    limits: NDArray[np.float64] = np.array(portion.limits, float)
    least = np.minimum(jobs.cap, jobs.output + 1)[run]
    if np.any(limits < least) or np.any(limits > np.maximum(jobs.cap, jobs.limit)[run]):
        return "a limit is below what is there, or beyond what was asked for"
    return ""


def _able(contest: Candidates, worker: WorkerSnapshot) -> Bools:
    """Who could run there: who rests there was taken once already."""
    jobs = contest.jobs
    fits = (jobs.model == worker.model) & (jobs.prompt + jobs.cap <= worker.reach_tokens)
    able: Bools = fits | (contest.is_paused_with_kv() & (jobs.home == worker.number))
    return able


def _could_run(contest: Candidates) -> Bools:
    able = np.zeros(len(contest.rows), bool)
    for worker in contest.workers:
        if worker.max_running:
            able |= _able(contest, worker)
    return able & ~contest.is_running

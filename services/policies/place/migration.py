"""Moves waiting requests with KV to another worker if the shorter wait is worth recomputing
their KV."""

from collections.abc import Sequence

import numpy as np

from services.forecast import Floats, Ints
from services.policies.parameters import Param
from services.policies.place.eligibility import can_serve, current_workers
from services.policies.place.loads import work_by_worker_s
from services.policies.snapshot import NOWHERE, Bools, Candidates

PART = 64  # rows that are judged together
MOVE_GAIN = {"move_gain": Param(0.0, 0.0, 1e6)}


def plan_moves(candidates: Candidates, gain: float) -> Ints:
    """As `current_workers`, with some of the paused requests moved; none at a `gain` of 0.

    A request that must wait where its KV is moves to a worker with room for it, if the work ahead
    of it there is less by more than `gain` times the seconds to recompute its KV; of
    several, to the one where both together are least. Room includes the expected output of the
    request and of those ahead of it; all that run at the other worker are ahead of it. A running
    request never moves. O(paused · workers).
    """
    at = current_workers(candidates)
    paused = np.flatnonzero(candidates.is_paused_with_kv())
    if gain <= 0 or len(candidates.workers) < 2 or not len(paused):
        return at
    turn = np.empty(len(at), np.int64)  # position in a single queue of all requests
    turn[np.lexsort((np.arange(len(at)), ~candidates.is_running, candidates.queue_key))] = (
        np.arange(len(at))
    )
    paused = paused[np.argsort(turn[paused])]
    jobs, workers = candidates.jobs, candidates.workers
    index = {worker.number: i for i, worker in enumerate(workers)}
    slots = np.array([worker.max_running for worker in workers])
    rooms = np.array([worker.room_tokens for worker in workers], float)
    work = work_by_worker_s(candidates)
    finals = np.repeat((jobs.context + jobs.expected_remaining)[:, None], len(workers), axis=1)
    ones = np.ones_like(work)
    work_s, tokens, count = _ahead(candidates, turn, paused, (work, finals, ones))
    recompute_s = _recompute_s(candidates)[paused]
    able = np.stack([can_serve(candidates, worker, paused) for worker in workers], axis=1)
    homes = np.array([index.get(home, NOWHERE) for home in jobs.home[paused].tolist()])
    known, worth_s = homes != NOWHERE, gain * recompute_s

    def find_movers(rows: Ints) -> tuple[Bools, Bools]:
        """Which of these rows move, and to which workers they could."""
        fits = (count[rows] < slots) & (tokens[rows] + finals[paused[rows]] <= rooms)
        here = homes[rows]
        saved_s = work_s[rows, here][:, None] - work_s[rows]
        wins = fits & able[rows] & (saved_s > worth_s[rows])
        stays = fits[np.arange(len(rows)), here]
        return known[rows] & ~stays & wins.any(axis=1), wins

    # Most rows stay: parts of them are judged together, again from each move on, because it changes
    # what is ahead of later rows.
    first = 0
    while first < len(paused):
        rows = np.arange(first, min(first + PART, len(paused)))
        moves, wins = find_movers(rows)
        if not moves.any():
            first += len(rows)
            continue
        nth = first + int(moves.argmax())
        row, here = paused[nth], homes[nth]
        cost_s = np.where(wins[nth - first], work_s[nth] + recompute_s[nth], np.inf)
        there = int(np.argmin(cost_s))
        at[row] = workers[there].number
        for ahead, mine in ((work_s, work[row]), (tokens, finals[row]), (count, ones[row])):
            ahead[nth + 1 :, here] -= mine[here]
            ahead[nth + 1 :, there] += mine[there]
        first = nth + 1
    return at


def _recompute_s(candidates: Candidates) -> Floats:
    """Seconds to recompute the KV of each request at each worker, (rows, workers)."""
    missing = np.repeat(candidates.jobs.context[:, None], len(candidates.workers), axis=1)
    if candidates.cached.size:
        missing = np.maximum(missing - candidates.cached, 0)
    seconds: Floats = missing * np.array([w.cost.prefill_token_s for w in candidates.workers])
    return seconds


def _ahead(
    candidates: Candidates, turn: Ints, paused: Ints, values: Sequence[Floats]
) -> list[Floats]:
    """The work served before each paused request at each worker, for each of the values (rows,
    workers), which count for all that run there; at home for those of them with an earlier turn;
    and for paused ones there that precede it."""
    home, workers = candidates.jobs.home, candidates.workers
    # Transposed, because columns are written and changed.
    ahead = [np.empty((len(workers), len(paused))).T for _ in values]
    for i, worker in enumerate(workers):
        runs = np.flatnonzero(candidates.is_running & (home == worker.number))
        runs = runs[np.argsort(turn[runs])]
        here = np.flatnonzero(home[paused] == worker.number)
        earlier = np.searchsorted(turn[runs], turn[paused[here]])
        waiting = np.zeros(len(paused))
        for whole, value in zip(ahead, values, strict=True):
            column = whole[:, i]
            totals = np.concatenate([[0.0], np.cumsum(value[runs, i])])
            waiting[here] = value[paused[here], i]
            column[:] = totals[-1]
            column[here] = totals[earlier]
            column += np.cumsum(waiting)
            column -= waiting
    return ahead

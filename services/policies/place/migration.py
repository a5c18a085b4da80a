"""Moves waiting requests with KV to another worker if the shorter wait is worth recomputing
their KV."""

from collections.abc import Sequence

import numpy as np

from services.forecast import Floats, Ints
from services.policies.parameters import Param
from services.policies.place.eligibility import can_serve_each, current_workers
from services.policies.place.loads import work_by_worker_s
from services.policies.snapshot import NOWHERE, Bools, Candidates

PART = 64  # rows that are judged together at first, and twice as many while none moves
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
    slots = np.array([worker.max_running for worker in workers])
    rooms = np.array([worker.room_tokens for worker in workers], float)
    work = work_by_worker_s(candidates)
    finals = np.broadcast_to((jobs.context + jobs.expected_remaining)[:, None], work.shape)
    ones = np.broadcast_to(1.0, work.shape)
    work_s, tokens, count = _ahead(candidates, turn, paused, (work, finals, ones))
    recompute_s = _recompute_s(candidates, paused)
    able = can_serve_each(candidates, paused)
    homes = candidates.indices_of(jobs.home[paused])
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
    first, part = 0, PART
    while first < len(paused):
        rows = np.arange(first, min(first + part, len(paused)))
        moves, wins = find_movers(rows)
        if not moves.any():
            first, part = first + len(rows), 2 * part
            continue
        part = PART
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


def _recompute_s(candidates: Candidates, at: Ints) -> Floats:
    """Seconds to recompute the KV of each of these at each worker, (at, workers)."""
    missing = candidates.jobs.context[at][:, None]
    if candidates.cached.size:
        missing = np.maximum(missing - candidates.cached[at], 0)
    seconds: Floats = missing * np.array([w.cost.prefill_token_s for w in candidates.workers])
    return seconds


def _ahead(
    candidates: Candidates, turn: Ints, paused: Ints, values: Sequence[Floats]
) -> list[Floats]:
    """The work served before each paused request at each worker, for each of the values (rows,
    workers), which count for all that run there; at home for those of them with an earlier turn;
    and for paused ones there that precede it. O(rows log rows + paused · workers)."""
    count, home = len(candidates.workers), candidates.indices_of(candidates.jobs.home)
    runs = (candidates.is_running & (home != NOWHERE)).nonzero()[0]
    runs = runs[np.lexsort((turn[runs], home[runs]))]
    at, turns = home[runs], len(turn)
    firsts = at.searchsorted(np.arange(count))
    nth = np.arange(1, len(runs) + 1) - firsts[at]
    here = (home[paused] != NOWHERE).nonzero()[0]
    homes = home[paused[here]]
    place = (at * turns + turn[runs]).searchsorted(homes * turns + turn[paused[here]])
    earlier = place - firsts[homes]
    found = []
    for value in values:
        totals = np.zeros((count, int(nth.max(initial=0)) + 1))  # of each worker's, in turn
        totals[at, nth] = value[runs, at]
        np.cumsum(totals, axis=1, out=totals)
        waiting = np.zeros((count, len(paused)))
        waiting[homes, here] = value[paused[here], homes]
        ahead = totals[:, -1:].repeat(len(paused), axis=1)
        ahead[homes, here] = totals[homes, earlier]
        ahead += waiting.cumsum(axis=1)
        ahead -= waiting
        found.append(ahead.T)
    return found

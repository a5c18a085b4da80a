"""Moves waiting requests with KV to another worker if the shorter wait is worth recomputing
their KV."""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.parameters import Param
from services.policies.place.eligibility import can_serve, current_workers
from services.policies.place.loads import work_by_worker_s
from services.policies.snapshot import Candidates

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
    work_s, tokens, count = (_ahead(candidates, turn, paused, v) for v in (work, finals, ones))
    recompute_s = _recompute_s(candidates)[paused]
    able = np.stack([can_serve(candidates, worker, paused) for worker in workers], axis=1)
    for nth, row in enumerate(paused.tolist()):
        here = index.get(int(jobs.home[row]))
        if here is None:
            continue
        fits = (count[nth] < slots) & (tokens[nth] + finals[row] <= rooms)
        wins = fits & able[nth] & (work_s[nth, here] - work_s[nth] > gain * recompute_s[nth])
        if fits[here] or not wins.any():
            continue
        there = int(np.argmin(np.where(wins, work_s[nth] + recompute_s[nth], np.inf)))
        at[row] = workers[there].number
        for ahead, mine in ((work_s, work[row]), (tokens, finals[row]), (count, ones[row])):
            ahead[nth + 1 :, here] -= mine[here]
            ahead[nth + 1 :, there] += mine[there]
    return at


def _recompute_s(candidates: Candidates) -> Floats:
    """Seconds to recompute the KV of each request at each worker, (rows, workers)."""
    missing = np.repeat(candidates.jobs.context[:, None], len(candidates.workers), axis=1)
    if candidates.cached.size:
        missing = np.maximum(missing - candidates.cached, 0)
    seconds: Floats = missing * np.array([w.cost.prefill_token_s for w in candidates.workers])
    return seconds


def _ahead(candidates: Candidates, turn: Ints, paused: Ints, values: Floats) -> Floats:
    """The work served before each paused request at each worker. `values` (rows, workers) count
    for all that run there; at home for those of them with an earlier turn; and for paused ones
    there that precede it."""
    home = candidates.jobs.home
    ahead = np.zeros((len(paused), len(candidates.workers)))
    for i, worker in enumerate(candidates.workers):
        runs = np.flatnonzero(candidates.is_running & (home == worker.number))
        runs = runs[np.argsort(turn[runs])]
        totals = np.concatenate([[0.0], np.cumsum(values[runs, i])])
        here = home[paused] == worker.number
        before = totals[np.searchsorted(turn[runs], turn[paused])]
        waiting = np.where(here, values[paused, i], 0.0)
        ahead[:, i] = np.where(here, before, totals[-1]) + np.cumsum(waiting) - waiting
    return ahead

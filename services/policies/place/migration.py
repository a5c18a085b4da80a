"""Moves waiting requests with KV to another worker if the shorter wait is worth making their KV
again."""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.parameters import Param
from services.policies.place.eligibility import settled, takes
from services.policies.place.loads import works_s
from services.policies.snapshot import Candidates

MOVE_GAIN = {"move_gain": Param(0.0, 0.0, 1e6)}


def moved(candidates: Candidates, gain: float) -> Ints:
    """As `settled`, with some of the resting requests moved; none at a `gain` of 0.

    A request that must wait where its KV is moves to a worker with room for it, if the work ahead
    of it there is less by more than `gain` times the seconds to prefill its context again; of
    several, to the one where both together are least. Room includes the expected output of the
    request and of those ahead of it; all that run at the other worker are ahead of it. A running
    request never moves. O(resting · workers).
    """
    at = settled(candidates)
    rests = np.flatnonzero(candidates.is_paused_with_kv())
    if gain <= 0 or len(candidates.workers) < 2 or not len(rests):
        return at
    turn = np.empty(len(at), np.int64)  # each one's position in a single queue for all
    turn[np.lexsort((np.arange(len(at)), ~candidates.is_running, candidates.queue_key))] = (
        np.arange(len(at))
    )
    rests = rests[np.argsort(turn[rests])]
    jobs, workers = candidates.jobs, candidates.workers
    index = {worker.number: i for i, worker in enumerate(workers)}
    slots = np.array([worker.max_running for worker in workers])
    rooms = np.array([worker.room_tokens for worker in workers], float)
    work = works_s(candidates)
    finals = np.repeat((jobs.context + jobs.expected_remaining)[:, None], len(workers), axis=1)
    ones = np.ones_like(work)
    work_s, tokens, count = (_ahead(candidates, turn, rests, v) for v in (work, finals, ones))
    again_s = _again_s(candidates)[rests]
    able = np.stack([takes(candidates, worker, rests) for worker in workers], axis=1)
    for nth, row in enumerate(rests.tolist()):
        here = index.get(int(jobs.home[row]))
        if here is None:
            continue
        fits = (count[nth] < slots) & (tokens[nth] + finals[row] <= rooms)
        wins = fits & able[nth] & (work_s[nth, here] - work_s[nth] > gain * again_s[nth])
        if fits[here] or not wins.any():
            continue
        there = int(np.argmin(np.where(wins, work_s[nth] + again_s[nth], np.inf)))
        at[row] = workers[there].number
        for ahead, mine in ((work_s, work[row]), (tokens, finals[row]), (count, ones[row])):
            ahead[nth + 1 :, here] -= mine[here]
            ahead[nth + 1 :, there] += mine[there]
    return at


def _again_s(candidates: Candidates) -> Floats:
    """Seconds to prefill each one's KV again at each worker, (rows, workers)."""
    missing = np.repeat(candidates.jobs.context[:, None], len(candidates.workers), axis=1)
    if candidates.cached.size:
        missing = np.maximum(missing - candidates.cached, 0)
    again: Floats = missing * np.array([w.cost.prefill_token_s for w in candidates.workers])
    return again


def _ahead(candidates: Candidates, turn: Ints, rests: Ints, values: Floats) -> Floats:
    """The work served before each resting request at each worker. `values` (rows, workers) count
    for all that run there; at home for those of them with an earlier turn; and for resting ones
    there that precede it."""
    home = candidates.jobs.home
    ahead = np.zeros((len(rests), len(candidates.workers)))
    for i, worker in enumerate(candidates.workers):
        runs = np.flatnonzero(candidates.is_running & (home == worker.number))
        runs = runs[np.argsort(turn[runs])]
        totals = np.concatenate([[0.0], np.cumsum(values[runs, i])])
        here = home[rests] == worker.number
        before = totals[np.searchsorted(turn[runs], turn[rests])]
        resting = np.where(here, values[rests, i], 0.0)
        ahead[:, i] = np.where(here, before, totals[-1]) + np.cumsum(resting) - resting
    return ahead

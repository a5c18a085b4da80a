"""Moving those who wait with KV somewhere to where they would wait less, if that is worth making
their KV again."""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.parameters import Param
from services.policies.place.eligibility import settled, takes
from services.policies.place.loads import works_s
from services.policies.snapshot import Candidates

MOVE_GAIN = {"move_gain": Param(0.0, 0.0, 1e6)}


def moved(contest: Candidates, gain: float) -> Ints:
    """As `settled`, but that some of those who rest are moved; none at a `gain` of 0.

    Who has to wait where its KV is goes to a worker that has room for it, if the work ahead of it
    there is less by more than `gain` times the seconds in which its context is computed anew: of
    several such to where both together are least. Room is counted with all that it, and those
    ahead of it, are expected to make; and all that run at the other worker are ahead of it. Who
    runs is never moved. O(resting · workers).
    """
    at = settled(contest)
    rests = np.flatnonzero(contest.is_paused_with_kv())
    if gain <= 0 or len(contest.workers) < 2 or not len(rests):
        return at
    turn = np.empty(len(at), np.int64)  # everybody's place, were there one line for all
    turn[np.lexsort((np.arange(len(at)), ~contest.is_running, contest.queue_key))] = np.arange(
        len(at)
    )
    rests = rests[np.argsort(turn[rests])]
    jobs, workers = contest.jobs, contest.workers
    index = {worker.number: i for i, worker in enumerate(workers)}
    places = np.array([worker.max_running for worker in workers])
    rooms = np.array([worker.room_tokens for worker in workers], float)
    work = works_s(contest)
    finals = np.repeat((jobs.context + jobs.expected_remaining)[:, None], len(workers), axis=1)
    ones = np.ones_like(work)
    work_s, tokens, count = (_ahead(contest, turn, rests, v) for v in (work, finals, ones))
    again_s = _again_s(contest)[rests]
    able = np.stack([takes(contest, worker, rests) for worker in workers], axis=1)
    for nth, row in enumerate(rests.tolist()):
        here = index.get(int(jobs.home[row]))
        if here is None:
            continue
        fits = (count[nth] < places) & (tokens[nth] + finals[row] <= rooms)
        wins = fits & able[nth] & (work_s[nth, here] - work_s[nth] > gain * again_s[nth])
        if fits[here] or not wins.any():
            continue
        there = int(np.argmin(np.where(wins, work_s[nth] + again_s[nth], np.inf)))
        at[row] = workers[there].number
        for ahead, mine in ((work_s, work[row]), (tokens, finals[row]), (count, ones[row])):
            ahead[nth + 1 :, here] -= mine[here]
            ahead[nth + 1 :, there] += mine[there]
    return at


def _again_s(contest: Candidates) -> Floats:
    """Seconds in which each one's KV is made anew at each worker, (rows, workers)."""
    missing = np.repeat(contest.jobs.context[:, None], len(contest.workers), axis=1)
    if contest.cached.size:
        missing = np.maximum(missing - contest.cached, 0)
    again: Floats = missing * np.array([w.cost.prefill_token_s for w in contest.workers])
    return again


def _ahead(contest: Candidates, turn: Ints, rests: Ints, values: Floats) -> Floats:
    """What is served before each of those who rest, in order, at each worker: `values` (rows,
    workers) of all that run there, where it is at home of those of them with an earlier turn, and
    of those who rest there and come before it."""
    home = contest.jobs.home
    ahead = np.zeros((len(rests), len(contest.workers)))
    for i, worker in enumerate(contest.workers):
        runs = np.flatnonzero(contest.is_running & (home == worker.number))
        runs = runs[np.argsort(turn[runs])]
        totals = np.concatenate([[0.0], np.cumsum(values[runs, i])])
        here = home[rests] == worker.number
        before = totals[np.searchsorted(turn[runs], turn[rests])]
        resting = np.where(here, values[rests, i], 0.0)
        ahead[:, i] = np.where(here, before, totals[-1]) + np.cumsum(resting) - resting
    return ahead

"""Dealing those who wait to workers: filter by who takes them, score by load, pick."""

from collections.abc import Callable

import numpy as np

from services.forecast import Ints
from services.policies.place.eligibility import free_places, seated, takes
from services.policies.place.loads import Loads
from services.policies.snapshot import NOWHERE, Candidates

# Of the workers that can (indices), by their scores for this job; `turn` counts jobs and rounds.
Pick = Callable[[list[float], int, list[int]], int]


def least(scores: list[float], turn: int, able: list[int]) -> int:
    return min(able, key=scores.__getitem__)


def next_in_turn(scores: list[float], turn: int, able: list[int]) -> int:
    return able[turn % len(able)]


def deal(
    contest: Candidates, at: Ints, loads: Loads, pick: Pick = least, longest_first: bool = False
) -> Ints:
    """The worker's number for every row, NOWHERE for who finds no place; `at` is the same of those
    who have one before.

    The others come in order or, with `longest_first`, those of them for whom places can be found,
    whoever fits the fewest workers first and among equals the longest (SCLS' max-min). A worker
    takes no more than the places that are free, or whose holders stand lower in the line than the
    first who waits. With one worker to choose from nothing is weighed. O(waiting · workers), over
    at most those places.
    """
    workers, at = contest.workers, at.copy()
    fresh = np.flatnonzero(at == NOWHERE)
    if not len(fresh) or not workers:
        return at
    free = [free_places(contest, worker) for worker in workers]
    if len(workers) == 1:
        able = fresh[takes(contest, workers[0], fresh)][: free[0]]
        at[able] = workers[0].number
        return at
    if longest_first:
        fresh, grades = seated(contest, workers, free, fresh)
        longest = loads.adds[fresh].min(axis=1)
        fresh = fresh[np.lexsort((-longest, -grades))]
    there, adds, scores = loads.there.tolist(), loads.adds[fresh].tolist(), loads.scores[fresh]
    able_rows = [takes(contest, worker, fresh).tolist() for worker in workers]
    total = sum(free)
    for nth, (row, beside) in enumerate(zip(fresh.tolist(), scores.tolist(), strict=True)):
        if total == 0:
            break
        can = [i for i in range(len(workers)) if free[i] > 0 and able_rows[i][nth]]
        if can:
            weighed = [load + score for load, score in zip(there, beside, strict=True)]
            chosen = pick(weighed, contest.round + nth, can)
            at[row] = workers[chosen].number
            free[chosen] -= 1
            total -= 1
            there[chosen] += adds[nth][chosen]
    return at

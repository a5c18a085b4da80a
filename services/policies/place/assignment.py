"""Assigns queued requests to workers: filter by eligibility, score by load, pick."""

from collections.abc import Callable

import numpy as np

from services.forecast import Ints
from services.policies.place.eligibility import can_serve, free_slots, select_placeable
from services.policies.place.loads import Loads
from services.policies.snapshot import NOWHERE, Candidates

# Picks among eligible workers (indices) by their scores for this request; `turn` counts requests
# and rounds.
Pick = Callable[[list[float], int, list[int]], int]
MIN_PART = 64  # requests that are looked at together


def least(scores: list[float], turn: int, able: list[int]) -> int:
    return min(able, key=scores.__getitem__)


def next_in_turn(scores: list[float], turn: int, able: list[int]) -> int:
    return able[turn % len(able)]


def assign(
    candidates: Candidates, at: Ints, loads: Loads, pick: Pick = least, longest_first: bool = False
) -> Ints:
    """The worker number of every row, NOWHERE without a slot. `at` has the numbers of rows that
    already have a worker.

    The others follow in order, or with `longest_first` those for which slots exist, the least
    flexible first and the longest first among equals (SCLS' max-min). A worker takes at most as
    many as it has slots that are free or whose holders stand behind the first waiting request. With
    a single worker nothing is scored. O(waiting · workers), over at most those slots.
    """
    workers, at = candidates.workers, at.copy()
    fresh = (at == NOWHERE).nonzero()[0]
    if not len(fresh) or not workers:
        return at
    free = free_slots(candidates)
    if len(workers) == 1:
        able = fresh[can_serve(candidates, workers[0], fresh)][: free[0]]
        at[able] = workers[0].number
        return at
    if longest_first:
        fresh, grades = select_placeable(candidates, workers, free, fresh)
        longest = loads.adds[fresh].min(axis=1)
        fresh = fresh[np.lexsort((-longest, -grades))]
    there, total, first = loads.there.tolist(), sum(free), 0
    spare = [i for i in range(len(workers)) if free[i] > 0]
    while total and first < len(fresh):  # parts: most of a long queue finds no slot
        part = slice(first, first + max(total, MIN_PART))
        rows = fresh[part]
        adds, scores = loads.adds[rows].tolist(), loads.scores[rows].tolist()
        able_rows = [can_serve(candidates, worker, rows).tolist() for worker in workers]
        everywhere = [all(able) for able in zip(*able_rows, strict=True)]
        for nth, row in enumerate(rows.tolist()):
            if total == 0:
                break
            can = spare if everywhere[nth] else [i for i in spare if able_rows[i][nth]]
            if can:
                weighed = [load + score for load, score in zip(there, scores[nth], strict=True)]
                chosen = pick(weighed, candidates.round + first + nth, can)
                at[row] = workers[chosen].number
                free[chosen] -= 1
                total -= 1
                there[chosen] += adds[nth][chosen]
                if not free[chosen]:
                    spare = [i for i in spare if free[i] > 0]
        first += len(rows)
    return at

"""Which worker a waiting job stands in line for: filter, score, pick."""

from collections.abc import Callable

import numpy as np

from services.forecast import Ints
from services.policies.snapshot import NOWHERE, Bools, Contest, Worker

Place = Callable[[Contest], Ints]


def least_load(contest: Contest) -> Ints:
    """Deal those who wait, in order, each to the worker that would be through the soonest.

    A worker's load is what its jobs hold and are still to make, over its speed with its memory
    full: a small worker beside a large one, or a slow one beside a fast one, gets its share, not
    half. It takes no more than the places that are free, or whose holders stand lower in the line
    than the first who waits. With one worker to choose from nothing is weighed.
    O(waiting · workers), over at most those places.
    """
    return _deal(contest, _least_loaded)


def round_robin(contest: Contest) -> Ints:
    """In turns, whatever they have to do. Each round begins one further on, so that who comes
    alone does not always find the same one first."""
    return _deal(contest, _next_in_turn)


Pick = Callable[[list[float], int, list[int]], int]


def _least_loaded(loads: list[float], turn: int, able: list[int]) -> int:
    return min(able, key=loads.__getitem__)


def _next_in_turn(loads: list[float], turn: int, able: list[int]) -> int:
    return able[turn % len(able)]


def _deal(contest: Contest, pick: Pick) -> Ints:
    """The worker's number for every row, NOWHERE for who finds no place; who runs or has KV
    somewhere stays there."""
    workers, jobs = contest.workers, contest.jobs
    fixed = contest.runs | contest.resting()
    at = np.where(fixed, jobs.home, NOWHERE)
    fresh = np.flatnonzero(~fixed)
    if not len(fresh):
        return at
    free = [_places(contest, worker) for worker in workers]
    if len(workers) == 1:
        able = fresh[_takes(contest, workers[0], fresh)][: free[0]]
        at[able] = workers[0].number
        return at
    weights = (jobs.context + jobs.left).tolist()
    loads = [_load(contest, worker) for worker in workers]
    speeds = [worker.full_speed for worker in workers]
    takes = [_takes(contest, worker, fresh).tolist() for worker in workers]
    total = sum(free)
    for nth, row in enumerate(fresh.tolist()):
        if total == 0:
            break
        can = [i for i in range(len(workers)) if free[i] > 0 and takes[i][nth]]
        if can:
            chosen = pick(loads, contest.round + nth, can)
            at[row] = workers[chosen].number
            free[chosen] -= 1
            total -= 1
            loads[chosen] += weights[row] / speeds[chosen]
    return at


def _takes(contest: Contest, worker: Worker, rows: Ints) -> Bools:
    jobs = contest.jobs
    reach = jobs.prompt[rows] + jobs.cap[rows]
    takes: Bools = (jobs.model[rows] == worker.model) & (reach <= worker.reach_tokens)
    return takes


def _places(contest: Contest, worker: Worker) -> int:
    """Free ones, and those whose holders the first who waits may pass."""
    here = contest.runs & (contest.jobs.home == worker.number)
    first = contest.line[~contest.runs].min()
    stay = int(np.count_nonzero(contest.line[here] <= first))
    return max(0, worker.places - stay)


def _load(contest: Contest, worker: Worker) -> float:
    jobs = contest.jobs
    here = jobs.home == worker.number
    tokens = np.sum(jobs.context[here]) + np.sum(jobs.left[here])
    return float(tokens) / worker.full_speed


PLACES: dict[str, Place] = {"least_load": least_load, "round_robin": round_robin}

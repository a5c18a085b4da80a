"""Which worker a waiting job stands in line for: filter, score, pick."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Ints
from services.policies.parameters import Param, Params
from services.policies.snapshot import NOWHERE, Bools, Contest, Jobs, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class Place:
    """`deal` says the number of the worker for every row of a contest, or NOWHERE. `cached`:
    whether it looks at what each would find cached."""

    deal: Callable[[Contest, Params], Ints]
    params: dict[str, Param] = field(default_factory=dict)
    cached: bool = False


def least_load(contest: Contest, params: Params) -> Ints:
    """Deal those who wait, in order, each to the worker that would be through the soonest.

    A worker's load is what its jobs hold and are still to make, over its speed with its memory
    full: a small worker beside a large one, or a slow one beside a fast one, gets its share, not
    half. It takes no more than the places that are free, or whose holders stand lower in the line
    than the first who waits. With one worker to choose from nothing is weighed.
    O(waiting · workers), over at most those places.
    """
    return _deal(contest, _least_loaded)


def round_robin(contest: Contest, params: Params) -> Ints:
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


def cached_tokens(snapshot: Snapshot, rows: Ints, jobs: Jobs) -> Ints:
    """Prompt tokens that each of these would find cached at each worker, (rows, workers): as many
    of a prompt's first blocks as are there without a gap. O(rows · CHAIN · log blocks) a worker."""
    found = np.zeros((len(rows), len(snapshot.workers)), np.int64)
    chains = snapshot.chains[rows]
    for column, worker in enumerate(snapshot.workers):
        if len(worker.prefixes):
            near = np.searchsorted(worker.prefixes, chains)
            there = worker.prefixes[np.minimum(near, len(worker.prefixes) - 1)] == chains
            blocks = np.cumprod(there & (chains != 0), axis=1).sum(axis=1)
            found[:, column] = np.minimum(blocks * worker.block_tokens, jobs.prompt)
    return found


PLACES: dict[str, Place] = {"least_load": Place(least_load), "round_robin": Place(round_robin)}

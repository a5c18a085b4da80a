"""Who may be dealt where: models, lengths and places."""

from collections.abc import Sequence

import numpy as np

from services.forecast import Ints
from services.policies.snapshot import NOWHERE, Bools, Candidates, WorkerSnapshot


def settled(contest: Candidates) -> Ints:
    """The worker of everyone who has one: who runs, or waits with KV there. Else NOWHERE."""
    fixed = contest.is_running | contest.is_paused_with_kv()
    return np.where(fixed, contest.jobs.home, NOWHERE)


def takes(contest: Candidates, worker: WorkerSnapshot, rows: Ints) -> Bools:
    """Who has its model, and could make all it may there."""
    jobs = contest.jobs
    reach = jobs.prompt[rows] + jobs.cap[rows]
    able: Bools = (jobs.model[rows] == worker.model) & (reach <= worker.reach_tokens)
    return able


def free_places(contest: Candidates, worker: WorkerSnapshot) -> int:
    """Free ones, and those whose holders the first who waits may pass."""
    here = contest.is_running & (contest.jobs.home == worker.number)
    first = contest.queue_key[~contest.is_running].min()
    stay = int(np.count_nonzero(contest.queue_key[here] <= first))
    return max(0, worker.max_running - stay)


def seated(
    contest: Candidates, workers: Sequence[WorkerSnapshot], free: Sequence[int], fresh: Ints
) -> tuple[Ints, Ints]:
    """The most urgent of `fresh`, as many as places can be found for, in their order; and how hard
    each is to seat: whoever fits fewer workers has the greater number. Dealt by falling numbers,
    each to any worker that takes it and has a place, all of them find one.

    Workers that take a length take all shorter ones, so a length's workers lie one within the
    other: all can be seated if, for each of these sets, no more need it than it has places (Hall).
    O(fresh · lengths that workers differ by).
    """
    jobs = contest.jobs
    grades = np.zeros(len(fresh), np.int64)
    chosen = np.zeros(len(fresh), bool)
    for model in {worker.model for worker in workers}:
        ours = [i for i, worker in enumerate(workers) if worker.model == model]
        reaches = sorted({workers[i].reach_tokens for i in ours})
        room = [sum(free[i] for i in ours if workers[i].reach_tokens >= r) for r in reaches]
        mine = np.flatnonzero(jobs.model[fresh] == model)
        needs = (jobs.prompt + jobs.cap)[fresh[mine]]
        grade = np.searchsorted(reaches, needs)
        able = grade < len(reaches)
        mine, grade = mine[able], grade[able]
        chosen[mine[_fitting(grade.tolist(), room)]] = True
        grades[mine] = grade
    kept = np.flatnonzero(chosen)
    return fresh[kept], grades[kept]


def _fitting(grades: list[int], room: list[int]) -> list[int]:
    """Positions that can be seated, the first first; `room[g]` is for grades of g or more."""
    room, fitting = list(room), []
    for at, grade in enumerate(grades):
        if min(room[: grade + 1]) > 0:
            fitting.append(at)
            for lower in range(grade + 1):
                room[lower] -= 1
        elif room[0] <= 0:
            break
    return fitting

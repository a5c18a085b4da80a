"""Which worker may serve which request: models, lengths and slots."""

from collections.abc import Sequence

import numpy as np

from services.forecast import Ints
from services.policies.snapshot import NOWHERE, Bools, Candidates, WorkerSnapshot


def current_workers(candidates: Candidates) -> Ints:
    """The worker of each request that runs or waits with KV there; else NOWHERE."""
    fixed = candidates.is_running | candidates.is_paused_with_kv()
    return np.where(fixed, candidates.jobs.home, NOWHERE)


def can_serve(candidates: Candidates, worker: WorkerSnapshot, rows: Ints) -> Bools:
    """Whether a worker has the request's model and can hold its longest answer."""
    jobs = candidates.jobs
    return worker.can_run(jobs.model[rows], jobs.longest_at(rows))


def can_serve_each(candidates: Candidates, workers: Sequence[WorkerSnapshot], rows: Ints) -> Bools:
    """The same of these rows at each of these workers, (rows, workers)."""
    jobs = candidates.jobs
    model = np.array([worker.model for worker in workers])
    reach = np.array([worker.reach_tokens for worker in workers])
    able: Bools = jobs.longest_at(rows)[:, None] <= reach
    able &= jobs.model[rows][:, None] == model
    return able


def free_slots(candidates: Candidates) -> list[int]:
    """Free slots of each worker, with those that the first waiting request may take by
    preemption."""
    first = candidates.queue_key[~candidates.is_running].min()
    stays = candidates.is_running & (candidates.queue_key <= first)
    most = max(worker.number for worker in candidates.workers)
    taken = np.bincount(candidates.jobs.home[stays] - NOWHERE, minlength=most - NOWHERE + 1)
    return [
        max(0, worker.max_running - int(taken[worker.number - NOWHERE]))
        for worker in candidates.workers
    ]


def select_placeable(
    candidates: Candidates, workers: Sequence[WorkerSnapshot], free: Sequence[int], fresh: Ints
) -> tuple[Ints, Ints]:
    """The most urgent of `fresh` for which slots exist, in their order, and how constrained each
    is: a request that fits fewer workers has the greater number. Assigned by falling number, each
    to any eligible worker with a slot, all of them find one.

    A worker that can serve a length can serve all shorter ones, so that the sets of workers by
    length are nested. All requests can be placed if, for each of these sets, no more need it than
    it has slots (Hall's theorem). O(fresh · lengths that workers differ by).
    """
    jobs = candidates.jobs
    grades = np.zeros(len(fresh), np.int64)
    chosen = np.zeros(len(fresh), bool)
    for model in {worker.model for worker in workers}:
        ours = [i for i, worker in enumerate(workers) if worker.model == model]
        reaches = sorted({workers[i].reach_tokens for i in ours})
        room = [sum(free[i] for i in ours if workers[i].reach_tokens >= r) for r in reaches]
        mine = np.flatnonzero(jobs.model[fresh] == model)
        needs = jobs.longest_at(fresh[mine])
        grade = np.searchsorted(reaches, needs)
        able = grade < len(reaches)
        mine, grade = mine[able], grade[able]
        chosen[mine[_fitting(grade.tolist(), room)]] = True
        grades[mine] = grade
    kept = np.flatnonzero(chosen)
    return fresh[kept], grades[kept]


def _fitting(grades: list[int], room: list[int]) -> list[int]:
    """Positions that can be placed, the first first; `room[g]` is for grades of at least g."""
    if len(room) == 1:
        return list(range(min(len(grades), room[0])))
    room, fitting = list(room), []
    for at, grade in enumerate(grades):
        if min(room[: grade + 1]) > 0:
            fitting.append(at)
            for lower in range(grade + 1):
                room[lower] -= 1
        elif room[0] <= 0:
            break
    return fitting

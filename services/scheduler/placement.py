"""Which worker a queued request is offered to: filter, score, pick."""

from collections.abc import Callable, Mapping, Sequence

from services.scheduler.jobs import Job, WorkerJobs

Offers = dict[str, list[Job]]


def _fits(job: Job, worker: WorkerJobs) -> bool:
    """Could it ever run there: the right model, and within reach."""
    request, view = job.request, worker.view
    return (
        view.model == request.model
        and request.prompt_tokens + request.max_tokens <= view.reach_tokens
    )


def least_load(queue: Sequence[Job], workers: Mapping[str, WorkerJobs]) -> Offers:
    """Deal the queue, in order, each to the worker with the least held and expected tokens.

    A worker takes no more than it may run at once; a dealt request counts towards its load.
    O(queue · workers), over at most the workers' free places.
    """
    offers: Offers = {name: [] for name in workers}
    load = {name: worker.load_tokens for name, worker in workers.items()}
    free = {name: w.view.max_running - len(w.running) for name, w in workers.items()}
    for job in queue:
        if not any(free.values()):
            break
        able = [n for n, w in workers.items() if free[n] > 0 and _fits(job, w)]
        if not able:
            continue
        pick = min(able, key=load.__getitem__)
        offers[pick].append(job)
        free[pick] -= 1
        load[pick] += job.request.prompt_tokens + job.output_tokens + job.mean_remaining
    return offers


PLACEMENTS: dict[str, Callable[[Sequence[Job], Mapping[str, WorkerJobs]], Offers]] = {
    "least_load": least_load
}

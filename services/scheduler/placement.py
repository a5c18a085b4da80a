"""Which worker a queued request is offered to: filter, score, pick."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.scheduler.jobs import Job, WorkerJobs

Offers = dict[str, list[Job]]


@dataclass(slots=True)
class Place:
    """A worker as the dealing goes on."""

    name: str
    model: str
    reach_tokens: int
    free: int
    load_tokens: float = 0.0
    jobs: list[Job] = field(default_factory=list)

    def takes(self, job: Job) -> bool:
        """It has a place left, the right model, and the request is within reach; and if the job
        has KV somewhere, it is here."""
        request = job.request
        return (
            self.free > 0
            and not (job.resting and job.home != self.name)
            and self.reach_tokens >= request.prompt_tokens + request.max_tokens
            and self.model == request.model
        )


def least_load(
    queue: Sequence[Job], workers: Mapping[str, WorkerJobs], yielding: Mapping[str, int]
) -> Offers:
    """Deal the queue, in order, each to the worker with the least held and expected tokens.

    A worker takes no more than it may run at once, less those who would stay if all of its
    `yielding` ones made way; a dealt request counts towards its load. With one worker there is
    nothing to choose, so nothing is weighed. O(queue · workers), over at most those places.
    """
    places = [
        _place(name, worker, yielding.get(name, 0), len(workers) > 1)
        for name, worker in workers.items()
    ]
    free = sum(place.free for place in places)
    for job in queue:
        if free == 0:
            break
        able = [place for place in places if place.takes(job)]
        if able:
            pick = able[0] if len(able) == 1 else min(able, key=lambda place: place.load_tokens)
            pick.jobs.append(job)
            pick.free -= 1
            free -= 1
            if len(places) > 1:
                pick.load_tokens += job.load_tokens
    return {place.name: place.jobs for place in places if place.jobs}


def _place(name: str, worker: WorkerJobs, yielding: int, weighed: bool) -> Place:
    view = worker.view
    free = max(0, view.max_running - len(worker.running) + yielding)
    load = sum(job.load_tokens for job in worker.running.values()) if weighed else 0.0
    return Place(name, view.model, view.reach_tokens, free, load)


Placement = Callable[[Sequence[Job], Mapping[str, WorkerJobs], Mapping[str, int]], Offers]
PLACEMENTS: dict[str, Placement] = {"least_load": least_load}

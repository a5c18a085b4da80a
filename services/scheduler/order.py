"""Who comes first in the queue. Keys ascend; a requeued request precedes all that never ran."""

from collections.abc import Callable

from services.scheduler.jobs import Job

Key = tuple[float, ...]


def arrival(job: Job) -> Key:
    """First come, first served; the evicted in front (ALGORITHMS 1, "when memory runs out")."""
    return (0.0 if job.preemptions else 1.0, job.request.arrival_s, job.serial)


ORDERS: dict[str, Callable[[Job], Key]] = {"arrival": arrival}

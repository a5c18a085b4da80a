"""Who is evicted first when a worker's memory runs out."""

from collections.abc import Callable, Iterable

from services.scheduler.jobs import Job


def newest(running: Iterable[Job]) -> list[str]:
    """The latest admitted first (papers/000 §2.4); `running` comes in order of admission."""
    return [job.request_id for job in running][::-1]


def least_urgent(running: Iterable[Job]) -> list[str]:
    """The last of the order first."""
    ranked = sorted(running, key=lambda job: job.rank.key, reverse=True)
    return [job.request_id for job in ranked]


VICTIMS: dict[str, Callable[[Iterable[Job]], list[str]]] = {
    "newest": newest,
    "least_urgent": least_urgent,
}

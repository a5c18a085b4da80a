"""Who is evicted first when a worker's memory runs out."""

from collections.abc import Callable, Iterable

from services.scheduler.jobs import Job


def newest(running: Iterable[Job]) -> list[str]:
    """The latest admitted first (papers/000 §2.4); `running` comes in order of admission."""
    return [job.request_id for job in running][::-1]


VICTIMS: dict[str, Callable[[Iterable[Job]], list[str]]] = {"newest": newest}

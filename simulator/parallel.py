"""Independent tasks in separate processes."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

T = TypeVar("T")


def available_cores() -> int:
    """Cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_parallel(
    tasks: Sequence[Callable[[], T]], processes: int, on_done: Callable[[int], None]
) -> list[T]:
    """The results of all tasks in their order, computed by up to `processes`, in this process if
    that is 1. `on_done` is called with the place of each task that ends. Tasks are pickled."""
    if min(processes, len(tasks)) == 1:
        results = []
        for place, task in enumerate(tasks):
            results.append(task())
            on_done(place)
        return results
    # A forked process would inherit the locks of the threads that show progress.
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        places = {pool.submit(task): place for place, task in enumerate(tasks)}
        try:
            for future in as_completed(places):
                future.result()
                on_done(places[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in places]

"""SpareCores: how many of PyTorch's threads a tiny model's step is worth, by what others leave.

On an idle machine a second thread makes a step of any size shorter (5 to 12 %, prefill 20 %).
Beside others it makes it twice as long: all threads wait for the one whose core is taken.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from services.worker.machine import TINY_PARAMETERS, cores, share_of_cores

TINY_THREADS = 2  # more were not measured for tiny models
LOOK_S = 0.25  # how often: of a core's time, kept in hundredths of a second, 4 % are seen
STALE_S = 1.0  # what an engine that had nothing to do for so long missed says nothing of now
# Of a core: so much of the one that is asked for may be others', as on any machine.
OTHERS_SHARE = 0.2
STAT = Path("/proc/stat")
IDLE = (3, 4)  # of its fields behind the name: idle, and waiting for a disk
GUEST = 8  # from here on what was counted before


class SpareCores:
    """Of `all_cores`, those free of others, at most `most`; one until it has looked, and wherever
    the system does not tell. `busy_s` are seconds of all cores since some moment, `own_s` this
    process's."""

    def __init__(
        self,
        all_cores: int,
        most: int,
        busy_s: Callable[[], float | None],
        own_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._all, self._most = all_cores, most
        self._busy_s, self._own_s, self._clock = busy_s, own_s, clock
        self._looked = self._look() if most > 1 else None
        self._threads = 1

    def threads(self) -> int:
        """Costs a look at the clock, and four times a second one at the system's counts (20 µs)."""
        if self._looked is None:
            return 1
        since_s, others_s = self._looked
        passed_s = self._clock() - since_s
        if passed_s < LOOK_S:
            return self._threads
        self._looked = self._look()
        if self._looked is None:
            return 1
        if passed_s > STALE_S:
            return self._threads
        now_s, now_others_s = self._looked
        others = (now_others_s - others_s) / (now_s - since_s)
        self._threads = max(1, min(self._most, int(self._all - others + OTHERS_SHARE)))
        return self._threads

    def take(self) -> None:
        """PyTorch computes with so many from here on, in the thread that calls."""
        if torch.get_num_threads() != self.threads():
            torch.set_num_threads(self._threads)

    def _look(self) -> tuple[float, float] | None:
        """When, and the seconds of cores that others have had."""
        busy_s = self._busy_s()
        return None if busy_s is None else (self._clock(), busy_s - self._own_s())


def spare_cores_for(parameters: int, local_workers: int) -> SpareCores | None:
    """For a model so small that its steps pay for another thread only while that one's core is
    free; None for a larger one, and where each worker has but a core."""
    most = min(TINY_THREADS, share_of_cores(local_workers))
    if parameters >= TINY_PARAMETERS or most < 2:
        return None
    return SpareCores(cores(), most, machine_busy_s)


def machine_busy_s() -> float | None:
    """Seconds of all cores since the start, what a hypervisor took too; None where no system
    tells."""
    try:
        fields = STAT.read_text().partition("\n")[0].split()[1:]
    except OSError:
        return None
    ticks = [int(field) for field in fields[:GUEST]]
    return (sum(ticks) - sum(ticks[i] for i in IDLE)) / os.sysconf("SC_CLK_TCK")

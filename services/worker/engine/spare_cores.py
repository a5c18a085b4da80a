"""SpareCores: how many PyTorch threads a tiny model's step gets, by the cores that others leave
free.

On an idle machine a second thread shortens a step of any size (5 to 12 %, prefill 20 %). Beside
other load it doubles the step: all threads wait for the one whose core is taken.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from services.worker.machine import TINY_PARAMETERS, cores, share_of_cores

TINY_THREADS = 2  # more were not measured for tiny models
# between two measurements; system counts have a resolution of 10 ms, here 4 % of a core
LOOK_S = 0.25
STALE_S = 1.0  # after a longer idle time the last measurement is outdated
# Of a core: other processes may use this much of a core that counts as free.
OTHERS_SHARE = 0.2
STAT = Path("/proc/stat")
IDLE = (3, 4)  # fields after the name: idle, and waiting for a disk
GUEST = 8  # fields from here on are included in earlier ones


class SpareCores:
    """Of `all_cores`, the number without other load, at most `most`; one before the first
    measurement, and where the system has no counts. `busy_s` are the busy seconds of all cores,
    `own_s` this process's."""

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
        """Reads the clock, and four times a second the system's counts (20 µs)."""
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

    def set_threads(self) -> None:
        """Sets the number of PyTorch threads of the calling thread."""
        if torch.get_num_threads() != self.threads():
            torch.set_num_threads(self._threads)

    def _look(self) -> tuple[float, float] | None:
        """Time of the measurement, and core seconds that others have used."""
        busy_s = self._busy_s()
        return None if busy_s is None else (self._clock(), busy_s - self._own_s())


def spare_cores_for(parameters: int, local_workers: int) -> SpareCores | None:
    """For a model so small that another thread only pays on a free core; None for a larger one, and
    if each worker has one core."""
    most = min(TINY_THREADS, share_of_cores(local_workers))
    if parameters >= TINY_PARAMETERS or most < 2:
        return None
    return SpareCores(cores(), most, machine_busy_s)


def machine_busy_s() -> float | None:
    """Busy seconds of all cores since boot, including what a hypervisor took; None if the system
    does not tell."""
    try:
        fields = STAT.read_text().partition("\n")[0].split()[1:]
    except OSError:
        return None
    ticks = [int(field) for field in fields[:GUEST]]
    return (sum(ticks) - sum(ticks[i] for i in IDLE)) / os.sysconf("SC_CLK_TCK")

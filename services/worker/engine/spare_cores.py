"""SpareCores: the number of PyTorch threads for a tiny model's step, by the cores that are free.

On an idle machine a second thread shortens a step of any size (5 to 12 %, prefill 20 %). On a busy
machine it doubles the step, because all threads wait for the one on the busy core.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from services.runtime.process_limits import cores
from services.worker.machine import TINY_PARAMETERS, cores_per_worker

TINY_THREADS = 2  # more were not measured for tiny models
# Between two measurements; the system's counts have a resolution of 10 ms, which is 4 % of this.
MEASURE_INTERVAL_S = 0.25
STALE_S = 1.0  # after a longer idle time the last measurement is outdated
# Share of a core that other processes may use while the core counts as free.
OTHERS_SHARE = 0.2
STAT = Path("/proc/stat")
IDLE = (3, 4)  # fields after the name: idle, and waiting for a disk
GUEST = 8  # fields from here on are included in earlier ones


class SpareCores:
    """Measures the number of `all_cores` without load of other processes, at most `most`. It is one
    before the first measurement, and where the system has no counts. `busy_s` returns the busy
    seconds of all cores, `own_s` those of this process."""

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
        self._measured = self._measure() if most > 1 else None
        self._threads = 1

    def threads(self) -> int:
        """The number of threads to use. Reads the clock, and the system's counts (20 µs) four times
        a second."""
        if self._measured is None:
            return 1
        since_s, others_s = self._measured
        passed_s = self._clock() - since_s
        if passed_s < MEASURE_INTERVAL_S:
            return self._threads
        self._measured = self._measure()
        if self._measured is None:
            return 1
        if passed_s > STALE_S:
            return self._threads
        now_s, now_others_s = self._measured
        others = (now_others_s - others_s) / (now_s - since_s)
        self._threads = max(1, min(self._most, int(self._all - others + OTHERS_SHARE)))
        return self._threads

    def set_threads(self) -> None:
        """Sets the number of PyTorch threads of the calling thread."""
        if torch.get_num_threads() != self.threads():
            torch.set_num_threads(self._threads)

    def _measure(self) -> tuple[float, float] | None:
        """Time of the measurement, and core seconds used by other processes; None without
        counts."""
        busy_s = self._busy_s()
        return None if busy_s is None else (self._clock(), busy_s - self._own_s())


def spare_cores_for(parameters: int, local_workers: int) -> SpareCores | None:
    """SpareCores for a model so small that another thread pays only on a free core; None for a
    larger model, and if each worker has one core."""
    most = min(TINY_THREADS, cores_per_worker(local_workers))
    if parameters >= TINY_PARAMETERS or most < 2:
        return None
    return SpareCores(cores(), most, machine_busy_s)


def machine_busy_s() -> float | None:
    """Busy seconds of all cores since boot, including those that a hypervisor took; None if the
    system has no counts."""
    try:
        fields = STAT.read_text().partition("\n")[0].split()[1:]
    except OSError:
        return None
    ticks = [int(field) for field in fields[:GUEST]]
    return (sum(ticks) - sum(ticks[i] for i in IDLE)) / os.sysconf("SC_CLK_TCK")

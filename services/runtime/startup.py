"""What a process does at its start alone: import what takes seconds, and say how long it took."""

import atexit
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

STARTTIME = 19  # of /proc/self/stat's fields behind the name: ticks from boot to the start

atexit.register(gc.unfreeze)  # at the end all is taken down as ever


@contextmanager
def importing() -> Iterator[None]:
    """No garbage is collected within, for imports make none, and what they make stays.

    To look through a million new objects again and again takes a sixth of an import of PyTorch
    and transformers; looked through later, with requests waiting, it would take a step's time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


class Laps:
    """How long the parts of a start take, each from the end of the one before."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._since_s = clock()
        self._laps: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        """`name` ends now."""
        now_s = self._clock()
        self._laps.append((name, now_s - self._since_s))
        self._since_s = now_s

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._laps)


def process_age_s() -> float:
    """Seconds since this process was started; 0 where the system doesn't tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    started_s = int(fields[STARTTIME]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s

"""What only a process's start needs: importing large packages, and timing its parts."""

import atexit
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

# Begins a line on stderr for the supervisor: a stage of the start, or UP.
STAGE_MARK = "\x1e"
UP = "up"
STARTTIME = 19  # field of /proc/self/stat after the name: start time in ticks since boot


@contextmanager
def importing() -> Iterator[None]:
    """Disables garbage collection within: imports create no garbage, and their objects stay.

    Scanning a million new objects repeatedly takes a sixth of the import of PyTorch and
    transformers; scanned later, it would delay a step.
    """
    _thaw_at_exit()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@cache
def _thaw_at_exit() -> None:
    """Unfreezes objects at exit, registered once."""
    atexit.register(gc.unfreeze)


ReportStage = Callable[[str], None]


def stage_reporter(started_by: int) -> ReportStage:
    """A function that reports stages to the supervisor of this process; without one it does
    nothing."""
    return _report_stage if started_by else lambda _: None


def _report_stage(stage: str) -> None:
    print(f"{STAGE_MARK}{stage}", file=sys.stderr, flush=True)


class Laps:
    """Durations of a start's parts, each from the end of the previous one. `report_stage` gets the
    activity that follows a finished part, looked up in `following` by the first word of its
    name."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        report_stage: ReportStage = lambda _: None,
        following: Mapping[str, str] | None = None,
    ):
        self._clock = clock
        self._since_s = clock()
        self._laps: list[tuple[str, float]] = []
        self._report_stage, self._following = report_stage, following or {}

    def lap(self, name: str) -> None:
        """Ends the part `name`."""
        now_s = self._clock()
        self._laps.append((name, now_s - self._since_s))
        self._since_s = now_s
        if stage := self._following.get(name.partition(" ")[0]):
            self._report_stage(stage)

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._laps)


def process_age_s() -> float:
    """Seconds since this process was started; 0 if the system does not report_stage."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    started_s = int(fields[STARTTIME]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s

"""Start of a process: import of large packages, stages for the supervisor, and durations."""

import atexit
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

STAGE_MARK = "\x1e"  # the first character of a line on stderr that names a stage of the start
UP = "up"
# New objects from one collection of the young to the next, which takes below a millisecond; how
# many of these until one of the middle-aged, which takes a few; how many of those until a full one.
# Python's own are 700, 10, 10. Failures and broken connections leave some cycles, so that full
# collections do not end altogether.
RARE_COLLECTIONS = (2_000, 5, 500)
STARTTIME = 19  # index in /proc/self/stat, after the process name, of ticks from boot to start


@contextmanager
def importing() -> Iterator[None]:
    """Disables garbage collection in the block, and excludes its objects from later collections.

    Collection takes a sixth of the time to import PyTorch and transformers. The million imported
    objects are never garbage; scanning them later would delay a step.
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


@contextmanager
def frozen_start() -> Iterator[None]:
    """Excludes every object of the start from garbage collection in the block: a full collection
    then visits only what requests have made since."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Garbage collection by RARE_COLLECTIONS in the block, for a service in which requests leave
    no cycles: with Python's own thresholds a full collection visits all live requests several times
    a minute, and stops all streams for up to 0.2 s."""
    before = gc.get_threshold()
    gc.set_threshold(*RARE_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


ReportStage = Callable[[str], None]


def stage_reporter(started_by: int) -> ReportStage:
    """A function that reports stages to the supervisor; without one (0) it does nothing."""
    return _report_stage if started_by else lambda _: None


def _report_stage(stage: str) -> None:
    print(f"{STAGE_MARK}{stage}", file=sys.stderr, flush=True)


class Laps:
    """Durations of the parts of a start, each from the end of the previous one. When a part ends,
    `report_stage` receives the next stage: the value in `following` for the first word of the
    part's name."""

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
    """Seconds since the start of this process; 0 on systems without /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    started_s = int(fields[STARTTIME]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s

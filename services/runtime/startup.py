"""What a process does at its start alone: import what takes seconds, and say how long it took."""

import atexit
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

# Begins a line on stderr that is for whoever started this process: a stage of its start, or UP.
STAGE_MARK = "\x1e"
UP = "up"
STARTTIME = 19  # of /proc/self/stat's fields behind the name: ticks from boot to the start


@contextmanager
def importing() -> Iterator[None]:
    """No garbage is collected within, for imports make none, and what they make stays.

    To look through a million new objects again and again takes a sixth of an import of PyTorch
    and transformers; looked through later, with requests waiting, it would take a step's time.
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
    """At the end all is taken down as ever; asked for once, however often was imported."""
    atexit.register(gc.unfreeze)


Tell = Callable[[str], None]


def teller(started_by: int) -> Tell:
    """Tells stages to the process that started this one, so that it can say what it waits for;
    nobody where none did."""
    return _tell if started_by else lambda _: None


def _tell(stage: str) -> None:
    print(f"{STAGE_MARK}{stage}", file=sys.stderr, flush=True)


class Laps:
    """How long the parts of a start take, each from the end of the one before. `tell` hears what
    begins when a part has ended, by the first word of its name, as `following` says."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        tell: Tell = lambda _: None,
        following: Mapping[str, str] | None = None,
    ):
        self._clock = clock
        self._since_s = clock()
        self._laps: list[tuple[str, float]] = []
        self._tell, self._following = tell, following or {}

    def lap(self, name: str) -> None:
        """`name` ends now."""
        now_s = self._clock()
        self._laps.append((name, now_s - self._since_s))
        self._since_s = now_s
        if stage := self._following.get(name.partition(" ")[0]):
            self._tell(stage)

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

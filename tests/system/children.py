"""Processes that another process started, found by the module they run."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.live import Live


def children(parent: int, module: str) -> list[int]:
    """Ids of the processes `python -m module` whose parent it is."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if module.encode() in arguments and _parent(folder) == parent:
                found.append(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    """Neither gone nor ended and not yet waited for."""
    try:
        return _fields(Path(f"/proc/{pid}"))[0] != "Z"
    except OSError:
        return False


@contextmanager
def paused_workers_of(live: Live) -> Iterator[None]:
    """They compute nothing meanwhile, however fast the machine is."""
    pids = children(live.process.pid, "services.worker")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _parent(folder: Path) -> int:
    return int(_fields(folder)[1])


def _fields(folder: Path) -> list[str]:
    """State, parent, … : what follows the name, which may hold anything."""
    return (folder / "stat").read_text().rpartition(")")[2].split()

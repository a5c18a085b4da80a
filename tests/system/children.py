"""Child processes of a live system, found by the module that they run."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.live import Live


def children(parent: int, module: str) -> list[int]:
    """Ids of the child processes of `parent` that run `python -m module`."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if module.encode() in arguments and _parent(folder) == parent:
                found.append(int(folder.name))
    return found


def kill_all(live: Live) -> None:
    """Kill a live system with all its processes, at once and without warning."""
    processes, found = [live.process.pid], 0
    while found < len(processes):
        found = len(processes)
        processes += [pid for pid in _children_of(processes) if pid not in processes]
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    live.process.wait(60)


def is_alive(pid: int) -> bool:
    """False for a process that has ended, a zombie included."""
    try:
        return _fields(Path(f"/proc/{pid}"))[0] != "Z"
    except OSError:
        return False


@contextmanager
def paused_workers_of(live: Live) -> Iterator[None]:
    """Stop the workers of a live system while the block runs."""
    pids = children(live.process.pid, "services.worker")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _children_of(parents: list[int]) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            if folder.name.isdigit() and _parent(folder) in parents:
                yield int(folder.name)


def _parent(folder: Path) -> int:
    return int(_fields(folder)[1])


def _fields(folder: Path) -> list[str]:
    """The fields of /proc/PID/stat after the command name: state, parent, …"""
    return (folder / "stat").read_text().rpartition(")")[2].split()

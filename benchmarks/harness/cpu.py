"""CPU time of the processes of a running system, by role."""

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from benchmarks.harness.system import cpu_seconds

GATEWAY = "gateway"
LOOP = "event loop"  # of the gateways, or of the first process if it is the front end
FRONT_END = "front end"  # all that vLLM has in its API server, and scheduling
FRONT_ROLES = frozenset(
    ("serve", "supervisor", GATEWAY, "scheduler", "estimator", "batcher", "API server")
)
# The role of a child process, by a word of its command line; the names in the tables.
ROLES: Mapping[str, str] = {
    "services.predictor": "predictor",
    "services.worker": "worker",
    "services.scheduler": "scheduler",
    "foretoken.running.scheduling": "scheduler",
    "services.estimator": "estimator",
    "services.batcher": "batcher",
    "gateway": GATEWAY,
    "EngineCore": "engine core",
}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

CpuTimes = dict[str, float]  # seconds by role


def read_cpu(pid: int, front: str) -> CpuTimes:
    """CPU seconds so far of a process and its descendants, by role. `front` is the role of the
    process itself; `LOOP` is main threads alone, `FRONT_END` the sum of FRONT_ROLES. Processes that
    have ended do not count."""
    times: CpuTimes = defaultdict(float)
    times[front] = cpu_seconds(pid)
    loops = {"": thread_seconds(pid)}
    for child in descendants(pid):
        with suppress(OSError):
            role = role_of(child)
            times[role] += cpu_seconds(child)
            if role == GATEWAY:
                loops[role] = loops.get(role, 0.0) + thread_seconds(child)
    times[FRONT_END] = sum(spent for role, spent in times.items() if role in FRONT_ROLES)
    times[LOOP] = loops.get(GATEWAY, loops[""])
    return dict(times)


def spent(before: CpuTimes, after: CpuTimes) -> CpuTimes:
    """Seconds between two readings, of the roles in both."""
    return {role: after[role] - before[role] for role in after if role in before}


def thread_seconds(pid: int) -> float:
    """CPU time of a process' main thread."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def role_of(pid: int) -> str:
    """The role of a child process; `other` for one that is not in ROLES."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return next((role for word, role in ROLES.items() if word in words), "other")


def descendants(pid: int) -> list[int]:
    """All processes that this one started, and those that they started."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, IndexError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children[int(fields[1])].append(int(folder.name))
    found, ahead = [], [pid]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found

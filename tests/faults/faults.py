"""Faults by name: each injects one fault into a process or its connections, and heals it."""

import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from tests.faults.system import CONNECTED, MACHINE, PROCESSES, System, eventually

# Takes the system, the target, and the seconds until the fault is healed.
Fault = Callable[[System, str, float], Awaitable[None]]
JITTER_S = 0.3
DAY_S = 86_400.0


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def _end(system: System, target: str, number: int) -> None:
    """Ends a process by a signal, and returns once another serves in its place."""
    await eventually(lambda: bool(system.pids(target)))
    times = system.times_back(target)
    _signal(system.pids(target)[:1], number)
    await eventually(lambda: system.times_back(target) > times)


async def kill(system: System, target: str, hold_s: float) -> None:
    await _end(system, target, signal.SIGKILL)


async def terminate(system: System, target: str, hold_s: float) -> None:
    """The process ends its work first."""
    await _end(system, target, signal.SIGTERM)


async def _hold(hold_s: float, heal: Callable[[], None]) -> None:
    try:
        await asyncio.sleep(hold_s)
    finally:
        heal()


async def stop(system: System, target: str, hold_s: float) -> None:
    """The process computes nothing, and its connections stay open."""
    pids = system.pids(target)[:1]

    def send(number: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    send(signal.SIGSTOP)
    await _hold(hold_s, lambda: send(signal.SIGCONT))


async def full_disk(system: System, target: str, hold_s: float) -> None:
    """The process can write to no file, its log included. Its pipes and connections work."""
    with no_writes(system.pids(target)[:1]):
        await asyncio.sleep(hold_s)


@contextmanager
def no_writes(pids: Sequence[int]) -> Iterator[None]:
    """No file may have a size while the block runs: a write of these processes fails with EFBIG."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size_bytes: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, most))

    limit(0)
    try:
        yield
    finally:
        limit(most)


async def clock_jump(system: System, target: str, hold_s: float) -> None:
    """The wall clock of all processes is a day ahead, then a day behind. Those that start meanwhile
    begin with the wrong time."""
    written = system.clock.with_suffix(".new")
    try:
        for ahead_s in (DAY_S, -DAY_S):
            written.write_text(str(ahead_s))
            written.rename(system.clock)
            await asyncio.sleep(hold_s / 2)
    finally:
        system.clock.unlink(missing_ok=True)


async def cut(system: System, target: str, hold_s: float) -> None:
    """All connections to the process are reset in mid-stream. New ones succeed."""
    system.link(target).reset()


async def delay(system: System, target: str, hold_s: float) -> None:
    """Bytes in both directions arrive late. None is lost."""
    link = system.link(target)
    link.close()
    await _hold(hold_s, link.open)


async def drop(system: System, target: str, hold_s: float) -> None:
    """Bytes in both directions are lost, and so are the connections in the end."""
    link = system.link(target)

    def heal() -> None:
        link.reset()
        link.open()

    link.close()
    await _hold(hold_s, heal)


async def half_open(system: System, target: str, hold_s: float) -> None:
    """The process receives, and what it sends arrives late."""
    gate = system.link(target).answers
    gate.close()
    await _hold(hold_s, gate.open)


async def jitter(system: System, target: str, hold_s: float) -> None:
    """Bytes arrive late by different times, so that messages of different connections change
    their order."""
    link = system.link(target)

    def heal() -> None:
        link.jitter_s = 0.0

    link.jitter_s = JITTER_S
    await _hold(hold_s, heal)


FAULTS: Mapping[str, Fault] = {
    "kill": kill,
    "terminate": terminate,
    "stop": stop,
    "full_disk": full_disk,
    "clock_jump": clock_jump,
    "cut": cut,
    "delay": delay,
    "drop": drop,
    "half_open": half_open,
    "jitter": jitter,
}
TARGETS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(FAULTS, CONNECTED),  # of their connections through the proxy
    **dict.fromkeys(("kill", "terminate", "stop", "full_disk"), PROCESSES),
    "clock_jump": (MACHINE,),
}


def choose_targets(names: str) -> dict[str, list[str]]:
    """The targets of some faults, `kill:worker,stop:gateway`, of which `worker` are all workers.
    Raises ValueError with a sentence for any other."""
    chosen: dict[str, list[str]] = {}
    for name in filter(None, names.split(",")):
        fault, _, section = name.partition(":")
        targets = [each for each in TARGETS.get(fault, ()) if each.partition("-")[0] == section]
        if not targets:
            known = {f"{f}:{each.partition('-')[0]}": 0 for f in TARGETS for each in TARGETS[f]}
            raise ValueError(f"there is no fault {name!r}; known: {', '.join(known)}")
        chosen.setdefault(fault, []).extend(targets)
    return chosen

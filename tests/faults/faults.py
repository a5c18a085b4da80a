"""Faults by name: each injects one fault into a process or its connections, and heals it."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from tests.faults.system import CONNECTED, PROCESSES, System, eventually

# Takes the system, the target, and the seconds until the fault is healed.
Fault = Callable[[System, str, float], Awaitable[None]]
JITTER_S = 0.3


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
    "cut": cut,
    "delay": delay,
    "drop": drop,
    "half_open": half_open,
    "jitter": jitter,
}
OF_PROCESSES = ("kill", "terminate", "stop")  # the others are of connections through the proxy
TARGETS: Mapping[str, Sequence[str]] = {
    name: PROCESSES if name in OF_PROCESSES else CONNECTED for name in FAULTS
}

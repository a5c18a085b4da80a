"""A run: requests and faults at the same time, and what became of the requests."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import takewhile

from foretoken.client.answers import Choice
from tests.faults.faults import FAULTS, TARGETS, terminate
from tests.faults.schedule import ENDING, Injection, schedule
from tests.faults.system import PROCESSES, System
from tests.faults.traffic import Traffic
from tests.faults.validation import Injected, Report, summarize

PAUSE_S = 2.5
UNLIMITED = 10**9  # requests

log = logging.getLogger(__name__)


class Injector:
    """Injects faults at their times. Several may last at once, but one at a target, and one worker
    is ended while the others serve."""

    def __init__(self, system: System):
        self.injected: list[Injected] = []
        self._began_s = asyncio.get_running_loop().time()
        self._system = system
        self._over = asyncio.Event()
        self._targets: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._ends: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by section

    async def run(
        self,
        seed: int,
        seconds: float,
        longest_s: float,
        pause_s: float,
        targets: Mapping[str, Sequence[str]],
    ) -> None:
        """Returns once the faults that begin within `seconds`, and before `stop`, are healed."""
        clock = asyncio.get_running_loop().time
        planned = schedule(seed, targets, longest_s, pause_s)
        async with asyncio.TaskGroup() as faults:
            for each in takewhile(lambda each: each.at_s < seconds, planned):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), self._began_s + each.at_s - clock())
                    break
                faults.create_task(self._inject(each))

    def stop(self) -> None:
        """No other fault begins."""
        self._over.set()

    async def _inject(self, injection: Injection) -> None:
        clock = asyncio.get_running_loop().time
        section = injection.target.partition("-")[0]
        end = self._ends[section] if injection.fault in ENDING else nullcontext()
        async with self._targets[injection.target], end:
            began_s = clock()
            await FAULTS[injection.fault](self._system, injection.target, injection.hold_s)
            healed_s = clock()
            self.injected.append(Injected(injection.fault, injection.target, began_s, healed_s))
            log.info(
                "%.1f s: %s %s, healed after %.1f s",
                began_s - self._began_s,
                injection.fault,
                injection.target,
                healed_s - began_s,
            )


async def run(
    system: System,
    expected: Mapping[int, Sequence[Choice]],
    seed: int,
    requests: int,
    seconds: float,
    longest_s: float,
    pause_s: float = PAUSE_S,
    targets: Mapping[str, Sequence[str]] = TARGETS,
) -> Report:
    """Receives up to `requests` answers while faults are injected for up to `seconds`, whichever is
    first, and waits until the system is idle again. `longest_s` bounds faults that do not end by
    themselves, and `pause_s` lies between two, on average. `targets` are those of each fault."""
    traffic, injector = Traffic(system.live.grpc, seed, requests), Injector(system)
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(traffic.run())
        injecting = tasks.create_task(injector.run(seed, seconds, longest_s, pause_s, targets))
        await asyncio.wait({sending, injecting}, return_when=asyncio.FIRST_COMPLETED)
        traffic.stop()
        injector.stop()
    await system.settle()
    return summarize(expected, traffic.deliveries, injector.injected)


async def roll(system: System, expected: Mapping[int, Sequence[Choice]], seed: int) -> Report:
    """Ends every process by SIGTERM under load, each once the one before serves again, and waits
    until the system is idle."""
    traffic, injected = Traffic(system.live.grpc, seed, UNLIMITED), []
    clock = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        for name in PROCESSES:
            for _ in system.pids(name):  # of several gateways, the one that is up longest
                began_s = clock()
                await terminate(system, name, 0.0)
                injected.append(Injected("terminate", name, began_s, clock()))
                log.info("%s serves again after %.1f s", name, clock() - began_s)
        traffic.stop()
    await system.settle()
    return summarize(expected, traffic.deliveries, injected)

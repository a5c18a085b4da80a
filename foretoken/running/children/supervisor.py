"""Supervises child processes: restarts one that ends, and goes on without one that keeps ending.

Requests continue meanwhile: the gateway resubmits, the scheduler requeues and adopts, and every
advisory service has a fallback. A restarted child keeps its name, address and device.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType

from foretoken.running.children.processes import Child, Exit, Launch, OnStage, Process, start
from foretoken.running.children.restart_policy import RestartCounter, RestartPolicy
from services.runtime.config import ConfigError
from services.runtime.errors import UnrecoverableError
from services.runtime.server import Lifecycle
from services.runtime.startup import UP
from services.runtime.tasks import run_to_completion

log = logging.getLogger(__name__)

STOP_S = 40.0  # between SIGTERM and SIGKILL; longer than a service's drain limit
ABANDON_S = 1.0  # the same while the system is still starting
# Nothing is served once every child of one of these sections has been given up.
REQUIRED = ("gateway", "scheduler", "worker")
FALLBACKS = {
    "gateway": "new connections go to the other gateways",
    "scheduler": "the requests of its model wait, and the other models are served",
    "worker": "its requests go to the other workers of its model",
    "predictor": "forecasts come from history",
    "batcher": "the scheduler arranges rounds",
    "estimator": "cost models are no longer updated",
}


class ProcessFailed(ConfigError):
    """A child rejected its settings."""


class Supervisor:
    """Keeps children running. `supervise` owns it and fails with its errors."""

    def __init__(
        self,
        children: Sequence[Child],
        lifecycle: Lifecycle,
        on_stage: OnStage,
        policy: RestartPolicy,
        launchers: Mapping[str, Launch],
    ):
        self._lifecycle, self._on_stage, self._policy = lifecycle, on_stage, policy
        self._launchers = launchers
        self._children = {child.name: child for child in children}
        self._given_up: set[str] = set()  # names; each is tried again now and then
        self._started = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._down_since_s: dict[str, float] = {}

    def finish_start(self) -> None:
        """All children are up: from now on a child that exits is restarted, whatever it reports."""
        self._started = True

    def count(self, section: str) -> int:
        """Returns the number of children of a section that are not given up."""
        kept = (child for name, child in self._children.items() if name not in self._given_up)
        return sum(child.section == section for child in kept)

    async def stop(self, sections: Collection[str]) -> None:
        """Stops the children of these sections concurrently, for good."""
        tasks = [
            self._tasks[name]
            for name, child in self._children.items()
            if child.section in sections and name in self._tasks
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start(self, group: asyncio.TaskGroup) -> None:
        for name, child in self._children.items():
            self._tasks[name] = group.create_task(self._keep(child), name=name)

    async def _keep(self, child: Child) -> None:
        restarts, clock = RestartCounter(self._policy), asyncio.get_running_loop().time
        while True:
            started_s = clock()
            launch = self._launchers.get(child.section, start)
            running = await launch(child, self._report_stage)
            ended = await self._wait(running)
            if self._rejects_settings(child, ended):
                raise ProcessFailed(ended.reason or f"the {child.name} process ended with {ended}")
            delay_s = restarts.record_exit(clock() - started_s)
            self._down_since_s.setdefault(child.name, clock())
            if delay_s is None:
                self._give_up(child, ended)
                delay_s = self._policy.retry_s
            else:
                log.warning("%s exited (%s); restarting it", child.name, ended)
            await asyncio.sleep(delay_s)

    async def _wait(self, running: Process) -> Exit:
        """Waits until the child exits; stops it if this task is cancelled."""
        try:
            return await running.wait()
        finally:
            grace_s = STOP_S if self._started else ABANDON_S
            await run_to_completion(running.stop(self._lifecycle, grace_s))

    def _rejects_settings(self, child: Child, ended: Exit) -> bool:
        """Whether a restart would fail the same way: the child exited during the system's start,
        with a message, or is required."""
        if self._started or not ended.failed:
            return False
        return bool(ended.reason) or child.section in REQUIRED

    def _give_up(self, child: Child, ended: Exit) -> None:
        self._given_up.add(child.name)
        policy = self._policy
        message = (
            f"{child.name} exited {policy.max_exits} times, each within {policy.steady_s:g} s of "
            f"its start; the last exit was {ended}"
        )
        if child.section in REQUIRED and not self.count(child.section):
            raise UnrecoverableError(message)
        fallback = FALLBACKS[child.section]
        log.warning("%s; it is tried again in %g s; %s", message, policy.retry_s, fallback)

    def _report_stage(self, name: str, stage: str) -> None:
        self._on_stage(name, stage)
        if stage != UP:
            return
        self._given_up.discard(name)
        if (down_s := self._down_since_s.pop(name, None)) is not None:
            log.warning("%s is back after %.1f s", name, asyncio.get_running_loop().time() - down_s)


@asynccontextmanager
async def supervise(
    children: Sequence[Child],
    lifecycle: Lifecycle,
    on_stage: OnStage = lambda *_: None,
    policy: RestartPolicy | None = None,
    launchers: Mapping[str, Launch] = MappingProxyType({}),
) -> AsyncIterator[Supervisor]:
    """Keeps these children running while the block runs, then stops them concurrently.

    The block fails with ProcessFailed if a child rejects its settings during the start, and with
    UnrecoverableError once all children of a required section are given up. `on_stage` receives the
    stages of each start. `launchers` start the children of their sections elsewhere than here.
    """
    supervisor = Supervisor(children, lifecycle, on_stage, policy or RestartPolicy(), launchers)
    async with asyncio.TaskGroup() as group:
        supervisor.start(group)
        try:
            yield supervisor
        finally:
            await supervisor.stop({child.section for child in children})

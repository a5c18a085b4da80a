"""Minding: what is started here is started again when it ends, and given up when it keeps ending.

Requests go on meanwhile: the gateway resubmits, the scheduler requeues, workers are adopted, and
whoever only advises is stood in for. A child comes back as the same: its name, address and device
are its settings.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from foretoken.running.children.patience import Lives, Patience
from foretoken.running.children.processes import Child, Ended, Running, ToldStage, start
from services.runtime.config import ConfigError
from services.runtime.errors import GaveUp
from services.runtime.server import Lifecycle
from services.runtime.startup import UP
from services.runtime.tasks import to_its_end

log = logging.getLogger(__name__)

STOP_S = 40.0  # between SIGTERM and SIGKILL: a service's own drain limit and a little more
ABANDON_S = 1.0  # the same where nothing was served yet
# Without all of these nothing is served.
INDISPENSABLE = ("gateway", "scheduler", "worker")
WITHOUT = {
    "worker": "its requests go to the others",
    "predictor": "forecasts come from history",
    "batcher": "rounds are arranged by the scheduler",
    "estimator": "cost models stay as they are",
}


class ProcessFailed(ConfigError):
    """A child can't be started as it was asked to."""


class Minder:
    """Keeps children. Owned by `minding`, whose block it may end with an error."""

    def __init__(
        self, children: Sequence[Child], lifecycle: Lifecycle, told: ToldStage, patience: Patience
    ):
        self._lifecycle, self._told, self._patience = lifecycle, told, patience
        self._living = {child.name: child for child in children}  # those not given up
        self._settled = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._away: dict[str, float] = {}  # since when, of those that were up

    def settle(self) -> None:
        """All is up: from now on no child's complaint is a mistake in how it was started."""
        self._settled = True

    def count(self, section: str) -> int:
        """Those of it that are not given up."""
        return sum(child.section == section for child in self._living.values())

    async def stop(self, sections: Collection[str]) -> None:
        """End the children of these, all at the same time; they are not started again."""
        tasks = [
            self._tasks[name]
            for name, child in self._living.items()
            if child.section in sections and name in self._tasks
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(self, group: asyncio.TaskGroup) -> None:
        for name, child in self._living.items():
            self._tasks[name] = group.create_task(self._keep(child), name=name)

    async def _keep(self, child: Child) -> None:
        lives, clock = Lives(self._patience), asyncio.get_running_loop().time
        while True:
            began_s = clock()
            running = await start(child, self._hear)
            ended = await self._end_of(running)
            if self._first_refused(child, ended):
                raise ProcessFailed(ended.reason or f"the {child.name} process ended with {ended}")
            again_s = lives.ended(clock() - began_s)
            if again_s is None:
                return self._give_up(child, ended)
            self._away.setdefault(child.name, clock())
            log.warning("%s ended (%s): it is started again", child.name, ended)
            await asyncio.sleep(again_s)

    async def _end_of(self, running: Running) -> Ended:
        """Stopped with us, however that comes about."""
        try:
            return await running.ended()
        finally:
            grace_s = STOP_S if self._settled else ABANDON_S
            await to_its_end(running.stop(self._lifecycle, grace_s))

    def _first_refused(self, child: Child, ended: Ended) -> bool:
        """It complained of how it was started: again would be no better. Who only advises and
        broke without a word is given its chances."""
        if self._settled or not ended.by_itself:
            return False
        return bool(ended.reason) or child.section in INDISPENSABLE

    def _give_up(self, child: Child, ended: Ended) -> None:
        del self._living[child.name]
        patience = self._patience
        why = (
            f"{child.name} ended {patience.ends_max} times, each within {patience.steady_s:g} s of "
            f"its start, and is given up; the last time with {ended}"
        )
        if child.section in INDISPENSABLE and not self.count(child.section):
            raise GaveUp(why)
        log.warning("%s: %s", why, WITHOUT[child.section])

    def _hear(self, name: str, stage: str) -> None:
        self._told(name, stage)
        if stage == UP and (since_s := self._away.pop(name, None)) is not None:
            away_s = asyncio.get_running_loop().time() - since_s
            log.warning("%s is back after %.1f s", name, away_s)


@asynccontextmanager
async def minding(
    children: Sequence[Child],
    lifecycle: Lifecycle,
    told: ToldStage = lambda *_: None,
    patience: Patience | None = None,
) -> AsyncIterator[Minder]:
    """Keep these children beside the block. Leaving it, they are ended, all at the same time.

    The block fails with ProcessFailed where a child refuses its settings as it is first started,
    and with GaveUp once one is given up that nothing is served without. `told` hears of stages.
    """
    minder = Minder(children, lifecycle, told, patience or Patience())
    async with asyncio.TaskGroup() as group:
        minder.begin(group)
        try:
            yield minder
        finally:
            await minder.stop({child.section for child in children})

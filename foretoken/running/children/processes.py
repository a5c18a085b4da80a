"""Service processes started by `foretoken serve`: begun, listened to, ended."""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from foretoken.running.options import Sections, as_arguments
from services.runtime.server import Lifecycle
from services.runtime.startup import STAGE_MARK
from services.runtime.tasks import to_its_end

LINE_BYTES = 2**20  # of what a child says, in one line

ToldStage = Callable[[str, str], None]  # the child's name, and what it is at


@dataclass(frozen=True)
class Child:
    """`python -m module`, to be minded. `section` is what it is: a worker, the predictor, …"""

    name: str  # worker-0, predictor, …
    section: str
    module: str
    overrides: Sections


@dataclass(frozen=True)
class Ended:
    """How a process ended: `reason` is its own last words, empty if it left none."""

    status: int
    reason: str = ""

    @property
    def by_itself(self) -> bool:
        """It left with a complaint, and was not killed."""
        return self.status > 0

    def __str__(self) -> str:
        return self.reason or f"status {self.status}"


class Running:
    """A started process. It has a session of its own, so that Ctrl-C reaches us alone and we stop
    it when drained."""

    def __init__(self, child: Child, process: asyncio.subprocess.Process, told: ToldStage):
        self._child, self._process, self._told = child, process, told
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> Ended:
        """Once it has; may be asked again."""
        reason = await asyncio.shield(self._reading)
        return Ended(await self._process.wait(), reason)

    async def stop(self, lifecycle: Lifecycle, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after a while or at a second signal to us."""
        if self._process.returncode is None:
            self._process.terminate()
            if lifecycle.aborting.is_set() or not await lifecycle.drain(self._over(), grace_s):
                self._process.kill()
        await self._process.wait()
        # What holds its stderr open by now is no child of ours.
        await asyncio.wait({self._reading}, timeout=1.0)
        self._reading.cancel()

    async def _over(self) -> None:
        await self._process.wait()

    async def _read(self) -> str:
        """Pass its stderr on until it ends; its last words are what it gives as the reason."""
        mark, reason = f"foretoken {self._child.section}: ", ""
        while line := await self._line():
            if line.startswith(STAGE_MARK):
                self._told(self._child.name, line.removeprefix(STAGE_MARK).strip())
            elif line.startswith(mark):
                reason = line.removeprefix(mark).strip()
            else:
                sys.stderr.write(line)
        return reason

    async def _line(self) -> str:
        """The next one; empty at the end. One that is too long is left out."""
        assert self._process.stderr is not None
        while True:
            try:
                return (await self._process.stderr.readline()).decode(errors="replace")
            except ValueError:
                continue


async def start(child: Child, told: ToldStage) -> Running:
    """Cancelled while it does, it leaves no process behind."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            child.module,
            *as_arguments(child.overrides),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=dict(os.environ),
            limit=LINE_BYTES,
        )
    )
    try:
        return Running(child, await asyncio.shield(starting), told)
    except asyncio.CancelledError:
        await to_its_end(_undone(starting))
        raise


async def _undone(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    process = await starting
    process.kill()
    await process.wait()

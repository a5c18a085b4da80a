"""Starts, reads and stops the service processes of `foretoken serve`."""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from foretoken.running.options import Sections, as_arguments
from services.runtime.server import Lifecycle
from services.runtime.startup import STAGE_MARK
from services.runtime.tasks import run_to_completion

MAX_LINE_BYTES = 2**20  # of a child's stderr

OnStage = Callable[[str, str], None]  # called with the child's name and its stage


@dataclass(frozen=True)
class Child:
    """A process to keep running: `python -m module`. `section` is its config section."""

    name: str  # worker-0, predictor, …
    section: str
    module: str
    overrides: Sections


@dataclass(frozen=True)
class Exit:
    """How a process exited; `reason` is its own error message, if it printed one."""

    status: int
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether it exited with an error, and was not killed by a signal."""
        return self.status > 0

    def __str__(self) -> str:
        return self.reason or f"status {self.status}"


class Running:
    """A started process. It runs in its own session, so that Ctrl-C does not reach it: it is
    stopped once the system has drained."""

    def __init__(self, child: Child, process: asyncio.subprocess.Process, on_stage: OnStage):
        self._child, self._process, self._on_stage = child, process, on_stage
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> Exit:
        """Waits until it exits. May be called repeatedly."""
        reason = await asyncio.shield(self._reading)
        return Exit(await self._process.wait(), reason)

    async def stop(self, lifecycle: Lifecycle, grace_s: float) -> None:
        """Sends SIGTERM, then SIGKILL after `grace_s` or at a second signal to this process."""
        if self._process.returncode is None:
            self._process.terminate()
            if lifecycle.aborting.is_set() or not await lifecycle.drain(
                self._wait_for_exit(), grace_s
            ):
                self._process.kill()
        await self._process.wait()
        # Another process may hold its stderr open.
        await asyncio.wait({self._reading}, timeout=1.0)
        self._reading.cancel()

    async def _wait_for_exit(self) -> None:
        await self._process.wait()

    async def _read(self) -> str:
        """Forwards its stderr until it ends; returns its error message."""
        mark, reason = f"foretoken {self._child.section}: ", ""
        while line := await self._read_line():
            if line.startswith(STAGE_MARK):
                self._on_stage(self._child.name, line.removeprefix(STAGE_MARK).strip())
            elif line.startswith(mark):
                reason = line.removeprefix(mark).strip()
            else:
                sys.stderr.write(line)
        return reason

    async def _read_line(self) -> str:
        """Returns the next line, empty at the end. A line that is too long is dropped."""
        assert self._process.stderr is not None
        while True:
            try:
                return (await self._process.stderr.readline()).decode(errors="replace")
            except ValueError:
                continue


async def start(child: Child, on_stage: OnStage) -> Running:
    """Starts a child. Leaves no process behind when cancelled."""
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
            limit=MAX_LINE_BYTES,
        )
    )
    try:
        return Running(child, await asyncio.shield(starting), on_stage)
    except asyncio.CancelledError:
        await run_to_completion(_kill_started(starting))
        raise


async def _kill_started(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    process = await starting
    process.kill()
    await process.wait()

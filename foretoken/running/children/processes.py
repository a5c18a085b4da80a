"""Starts, reads and stops the service processes of `foretoken serve`."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

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


class Process(Protocol):
    """A started process, on this machine or on another one."""

    async def wait(self) -> Exit:
        """Waits until it exits. May be called repeatedly."""

    async def stop(self, lifecycle: Lifecycle, grace_s: float) -> None:
        """Sends SIGTERM, then SIGKILL after `grace_s` or at a second signal to this process."""


Launch = Callable[[Child, OnStage], Awaitable[Process]]


class Messages:
    """Takes the lines that a child writes to stderr: reports its stages, keeps its error message
    in `reason`, and forwards the others."""

    def __init__(self, child: Child, on_stage: OnStage):
        self._name, self._mark = child.name, f"foretoken {child.section}: "
        self._on_stage = on_stage
        self.reason = ""

    def take(self, line: str) -> None:
        if line.startswith(STAGE_MARK):
            self._on_stage(self._name, line.removeprefix(STAGE_MARK).strip())
        elif line.startswith(self._mark):
            self.reason = line.removeprefix(self._mark).strip()
        else:
            sys.stderr.write(line)


class Running:
    """A started process. It runs in its own session, so that Ctrl-C does not reach it: it is
    stopped once the system has drained."""

    def __init__(self, child: Child, process: asyncio.subprocess.Process, on_stage: OnStage):
        self._process, self._messages = process, Messages(child, on_stage)
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
        """Takes its messages until they end; returns its error message."""
        assert self._process.stderr is not None
        while line := await read_line(self._process.stderr):
            self._messages.take(line)
        return self._messages.reason


async def read_line(stream: asyncio.StreamReader) -> str:
    """Returns the next line, empty at the end. A line that is too long is dropped."""
    while True:
        try:
            return (await stream.readline()).decode(errors="replace")
        except ValueError:
            continue


async def start(child: Child, on_stage: OnStage) -> Running:
    """Starts a child on this machine. Leaves no process behind when cancelled."""
    starting = asyncio.ensure_future(execute(child.module, child.overrides, dict(os.environ)))
    try:
        return Running(child, await asyncio.shield(starting), on_stage)
    except asyncio.CancelledError:
        await run_to_completion(_kill_started(starting))
        raise


async def execute(
    module: str, overrides: Sections, environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    """Starts `python -m module` with these settings, and a pipe for its stderr."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *as_arguments(overrides),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=environment,
        limit=MAX_LINE_BYTES,
    )


async def _kill_started(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    process = await starting
    process.kill()
    await process.wait()

"""The actor that runs one worker on its node of a Ray cluster.

The worker's process is a child of the actor's: it exits by itself when the actor is lost.
"""

import asyncio
import os
from collections.abc import Mapping

from foretoken.running.children.processes import execute, read_line
from foretoken.running.options import Sections
from foretoken.running.ports import free_port
from services.runtime.network.channel import host_port

LINES_MAX = 1_000  # of one answer to the supervisor


class WorkerHost:
    """Starts a worker and tells the supervisor what it writes and how it exits."""

    def __init__(self, host: str):
        """`host` is the address of the node."""
        self._host = host
        self._lines: asyncio.Queue[str] = asyncio.Queue(LINES_MAX)  # ends with an empty line
        self._ended = False  # whether the empty line is read

    async def start(self, module: str, overrides: Sections, environment: Mapping[str, str]) -> None:
        """Starts the worker at its address, or at another port if its place has moved here."""
        settings = overrides["worker"]
        at = settings["address"]
        if at.rpartition(":")[0] != host_port(self._host, 0).rpartition(":")[0]:
            at = host_port(self._host, free_port(self._host))
        own = {**settings, "address": at, "started_by": str(os.getpid())}
        everything = dict(os.environ) | dict(environment)
        self._process = await execute(module, {**overrides, "worker": own}, everything)
        self._reading = asyncio.create_task(self._read())

    async def read(self) -> list[str]:
        """Waits for lines of the worker's stderr; returns all there are, none after the last."""
        if self._ended:
            return []
        found = [await self._lines.get()]
        while not self._lines.empty():
            found.append(self._lines.get_nowait())
        self._ended = not found[-1]
        return [line for line in found if line]

    async def status(self) -> int:
        """Waits until the worker exits; returns its exit status."""
        return await self._process.wait()

    async def terminate(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def _read(self) -> None:
        assert self._process.stderr is not None
        while line := await read_line(self._process.stderr):
            await self._lines.put(line)
        await self._lines.put("")

"""Service processes started by `foretoken serve`: begun, watched, ended together."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from foretoken.options import Sections, as_arguments
from services.runtime.config import ConfigError
from services.runtime.server import Lifecycle
from services.runtime.tasks import background

STOP_S = 40.0  # between SIGTERM and SIGKILL: a service's own drain limit and a little more


class ProcessFailed(ConfigError):
    """A service process ended by itself."""


@asynccontextmanager
async def running(
    section: str, module: str, overrides: Sections, lifecycle: Lifecycle
) -> AsyncIterator[None]:
    """`python -m module` beside the block; should it end first, the block fails with its reason.

    It has a session of its own, so that Ctrl-C reaches us alone and we stop it when drained.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *as_arguments(overrides),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=dict(os.environ),
    )
    try:
        async with background(_watch(section, process)):
            yield
    finally:
        await _stop(process, lifecycle)


async def _watch(section: str, process: asyncio.subprocess.Process) -> None:
    """Pass its stderr on; its end is an error, told in its own last words if it left any."""
    assert process.stderr is not None
    mark, reason = f"foretoken {section}: ", ""
    async for raw in process.stderr:
        line = raw.decode(errors="replace")
        if line.startswith(mark):
            reason = line.removeprefix(mark).strip()
        else:
            sys.stderr.write(line)
    status = await process.wait()
    raise ProcessFailed(reason or f"the {section} process ended with status {status}")


async def _stop(process: asyncio.subprocess.Process, lifecycle: Lifecycle) -> None:
    """SIGTERM, then SIGKILL after a while or at a second signal to us."""
    if process.returncode is not None:
        return
    process.terminate()
    if not await lifecycle.drain(_ended(process), STOP_S):
        process.kill()
        await process.wait()


async def _ended(process: asyncio.subprocess.Process) -> None:
    await process.wait()

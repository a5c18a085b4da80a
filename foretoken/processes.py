"""Service processes started by `foretoken serve`: begun, watched, ended together."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from grpc import aio

from foretoken.options import Sections, as_arguments
from services.runtime.backoff import Backoff
from services.runtime.config import ConfigError
from services.runtime.server import Lifecycle
from services.runtime.tasks import background

log = logging.getLogger(__name__)

RESTARTS = Backoff(0.5, 30.0)
STEADY_S = 60.0  # what ran for longer had no lasting fault: it is started again soon
STOP_S = 40.0  # between SIGTERM and SIGKILL: a service's own drain limit and a little more


class ProcessFailed(ConfigError):
    """A service process ended by itself."""


@dataclass(frozen=True)
class Ended:
    """How a process ended: `reason` is its own last words, empty if it left none."""

    status: int
    reason: str


@asynccontextmanager
async def running(
    section: str, module: str, overrides: Sections, lifecycle: Lifecycle
) -> AsyncIterator[None]:
    """`python -m module` beside the block; should it end first, the block fails with its reason.

    It has a session of its own, so that Ctrl-C reaches us alone and we stop it when drained.
    """
    async with (
        _started(module, overrides, lifecycle) as process,
        background(_must_last(section, process)),
    ):
        yield


@asynccontextmanager
async def kept_running(
    section: str, module: str, overrides: Sections, lifecycle: Lifecycle, channel: aio.Channel
) -> AsyncIterator[None]:
    """As `running`, for a service that can be done without: when it ends it is started again.

    Only where it refuses its settings, so ends with a reason before `channel` ever reached it,
    the block fails with that.
    """
    reached = asyncio.Event()
    keep = _keep(section, module, overrides, lifecycle, reached)
    async with background(keep, _notice(channel, reached)):
        yield


async def _keep(
    section: str, module: str, overrides: Sections, lifecycle: Lifecycle, reached: asyncio.Event
) -> None:
    clock = asyncio.get_running_loop().time
    failures = 0
    while True:
        began_s = clock()
        async with _started(module, overrides, lifecycle) as process:
            ended = await _end_of(section, process)
        if ended.reason and not reached.is_set():
            raise ProcessFailed(ended.reason)
        failures = 0 if clock() - began_s > STEADY_S else failures
        if not failures:
            log.warning("the %s ended (%s): it is started again", section, _how(ended))
        await asyncio.sleep(RESTARTS.after_s(failures))
        failures += 1


async def _notice(channel: aio.Channel, reached: asyncio.Event) -> None:
    await channel.channel_ready()
    reached.set()


@asynccontextmanager
async def _started(
    module: str, overrides: Sections, lifecycle: Lifecycle
) -> AsyncIterator[asyncio.subprocess.Process]:
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
        yield process
    finally:
        await _stop(process, lifecycle)


async def _must_last(section: str, process: asyncio.subprocess.Process) -> None:
    """Its end is an error."""
    ended = await _end_of(section, process)
    raise ProcessFailed(ended.reason or f"the {section} process ended with {_how(ended)}")


async def _end_of(section: str, process: asyncio.subprocess.Process) -> Ended:
    """Pass its stderr on until it ends; its last words are what it gives as the reason."""
    assert process.stderr is not None
    mark, reason = f"foretoken {section}: ", ""
    async for raw in process.stderr:
        line = raw.decode(errors="replace")
        if line.startswith(mark):
            reason = line.removeprefix(mark).strip()
        else:
            sys.stderr.write(line)
    return Ended(await process.wait(), reason)


def _how(ended: Ended) -> str:
    return ended.reason or f"status {ended.status}"


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

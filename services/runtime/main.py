"""A service as a process: read config, build, serve, drain, leave. Every `__main__` ends here."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import uvloop
from prometheus_client import CollectorRegistry

from services.runtime.config import ConfigError, Settings, check_environment, load, parse_sets
from services.runtime.server import Lifecycle, Mount, listening
from services.runtime.tasks import background, cause
from services.runtime.telemetry import serve_metrics, setup_logging

log = logging.getLogger(__name__)

PARENT_LOOK_S = 1.0


@dataclass(frozen=True)
class Unit:
    """A service ready to be served: what it mounts, its background work, and how it drains."""

    mounts: Sequence[Mount]
    run: Callable[[], Coroutine[Any, Any, None]]
    drain: Callable[[], Coroutine[Any, Any, None]]


async def nothing() -> None:
    """The background work, or the drain, of a service that has none."""


class ServedSettings(Settings):
    """Settings of a service that runs under `run_service`."""

    address: str
    metrics_port: int = 0  # 0: no /metrics of its own
    log_level: str = "INFO"
    started_by: int = 0  # id of the process whose end is ours too; 0: none's
    drain_s: float = 30.0  # what a first SIGTERM leaves what is running; a second takes it back


ConfigT = TypeVar("ConfigT", bound=ServedSettings)
Build = Callable[[CollectorRegistry], Unit]
Sets = Mapping[str, Mapping[str, str]]  # section → key → value


def run_service(kind: type[ConfigT], build: Callable[[ConfigT, CollectorRegistry], Unit]) -> None:
    """The whole life of a service process. A mistake in config ends it with one line, status 2."""
    run_process(kind, [], lambda config, _: partial(build, config))


def run_process(
    kind: type[ConfigT], shared: Sequence[str], prepare: Callable[[ConfigT, Sets], Build]
) -> None:
    """As `run_service`, for a service that reads sections it shares with others: `prepare` gets
    what was set of each."""
    try:
        check_environment()
        sets = parse_sets(_sets(sys.argv[1:]), [kind.section, *shared])
        config = load(kind, sets[kind.section])
        setup_logging(kind.section, config.log_level)
        uvloop.run(serve(config, prepare(config, sets)))
    except (ValueError, ExceptionGroup) as error:
        leave(f"foretoken {kind.section}", error)


def leave(name: str, error: Exception) -> NoReturn:
    """End the process: a user's mistake as one line and status 2, anything else as it is."""
    reason = cause(error)
    if not isinstance(reason, ValueError):
        raise error
    print(f"{name}: {reason}", file=sys.stderr)
    sys.exit(2)


def _sets(argv: Sequence[str]) -> list[str]:
    """`--set section.key=value` pairs, the only option a service takes."""
    if len(argv) % 2 or any(flag != "--set" for flag in argv[::2]):
        raise ConfigError("usage: [--set section.key=value]...")
    return list(argv[1::2])


async def serve(config: ServedSettings, build: Build) -> None:
    """Serve until the first signal, then drain until done, the limit, or the second."""
    registry = CollectorRegistry()
    unit = build(registry)
    serve_metrics(registry, config.metrics_port)
    lifecycle = Lifecycle()
    lifecycle.install()
    work = [unit.run()] + ([_outlive_not(config.started_by)] if config.started_by else [])
    async with background(*work), listening(unit.mounts, config.address) as server:
        log.info("listening on %s", config.address)
        await lifecycle.draining.wait()
        await server.set_serving(False)
        if not await lifecycle.drain(unit.drain(), config.drain_s):
            log.warning("stopping with requests unfinished")


async def _outlive_not(parent: int) -> None:
    """Raises ValueError once the parent is gone, however it went."""
    while True:
        await asyncio.sleep(PARENT_LOOK_S)
        if os.getppid() != parent:
            raise ValueError("whoever started it is gone")

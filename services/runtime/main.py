"""A service as a process: read config, build, serve, drain, leave. Every `__main__` ends here."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import uvloop
from prometheus_client import CollectorRegistry

from observability.exposition import Part
from observability.tracing import Tracing
from services.runtime.config import (
    COMMON,
    ConfigError,
    Settings,
    check_environment,
    load,
    parse_sets,
)
from services.runtime.errors import GaveUp
from services.runtime.observed.logs import LoggingConfig, log_as
from services.runtime.observed.scrape import metrics_over_http
from services.runtime.observed.tracing import TracingConfig, interceptors, tracing_of
from services.runtime.open_files import allow_open_files
from services.runtime.server import Lifecycle, Mount, listening
from services.runtime.startup import UP, teller
from services.runtime.tasks import background, cause

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
    socket: str = ""  # a file where gRPC is served beside the address; its rights say who may ask
    metrics_port: int = 0  # 0: no /metrics of its own
    metrics_host: str = "127.0.0.1"  # where that is; metrics are for those who run it
    log_level: str = "INFO"
    # Id of the process that minds this one: its end is ours too, and it is told stages of our
    # start, as marked lines on stderr; 0: none does.
    started_by: int = 0
    drain_s: float = 30.0  # what a first SIGTERM leaves what is running; a second takes it back

    @property
    def metric_labels(self) -> Mapping[str, str]:
        """Labels of all that the process counts, as the catalogue names them for its service."""
        return {}


ConfigT = TypeVar("ConfigT", bound=ServedSettings)
Build = Callable[[CollectorRegistry, Tracing], Unit]
Sets = Mapping[str, Mapping[str, str]]  # section → key → value


def run_service(
    kind: type[ConfigT], build: Callable[[ConfigT, CollectorRegistry, Tracing], Unit]
) -> None:
    """The whole life of a service process. A mistake in config ends it with one line, status 2."""
    run_process(kind, [], lambda config, _: partial(build, config))


def run_process(
    kind: type[ConfigT], shared: Sequence[str], prepare: Callable[[ConfigT, Sets], Build]
) -> None:
    """As `run_service`, for a service that reads sections it shares with others: `prepare` gets
    what was set of each."""
    try:
        check_environment()
        sets = parse_sets(_sets(sys.argv[1:]), [kind.section, *COMMON, *shared])
        config = load(kind, sets[kind.section])
        log_as(kind.section, config.log_level, sets[LoggingConfig.section])
        allow_open_files()
        with closing(tracing_of(sets[TracingConfig.section])) as tracing:
            uvloop.run(serve(config, prepare(config, sets), tracing))
    except (ValueError, ExceptionGroup) as error:
        leave(f"foretoken {kind.section}", error)
    end_at_once()


def end_at_once(status: int = 0) -> NoReturn:
    """End the process once all of its own was closed: to take down a million objects of PyTorch's,
    which the system frees anyway, takes a second of a busy core."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def leave(name: str, error: Exception) -> NoReturn:
    """End the process: a user's mistake as one line and status 2, one that gave up as one line and
    status 1, anything else as it is. After all that the log still had to say."""
    logging.shutdown()
    reason = cause(error)
    if not isinstance(reason, (ValueError, GaveUp)):
        raise error
    print(f"{name}: {reason}", file=sys.stderr)
    sys.exit(2 if isinstance(reason, ValueError) else 1)


def _sets(argv: Sequence[str]) -> list[str]:
    """`--set section.key=value` pairs, the only option a service takes."""
    if len(argv) % 2 or any(flag != "--set" for flag in argv[::2]):
        raise ConfigError("usage: [--set section.key=value]...")
    return list(argv[1::2])


async def serve(config: ServedSettings, build: Build, tracing: Tracing) -> None:
    """Serve until the first signal, then drain until done, the limit, or the second."""
    registry = CollectorRegistry()
    unit = build(registry, tracing)
    parts = [Part(registry, config.metric_labels)]
    calls = interceptors(tracing.service(config.section))
    lifecycle = Lifecycle()
    lifecycle.install()
    async with AsyncExitStack() as stack:
        if config.metrics_port:
            http = metrics_over_http(config.metrics_host, config.metrics_port, parts)
            await stack.enter_async_context(http)
        look = [_outlive_not(config.started_by)] if config.started_by else []
        await stack.enter_async_context(background(unit.run(), *look))
        server = await stack.enter_async_context(
            listening(
                unit.mounts,
                config.address,
                parts=parts,
                interceptors=calls,
                beside=[f"unix:{config.socket}"] if config.socket else [],
            )
        )
        log.info("listening on %s", config.address)
        teller(config.started_by)(UP)
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

"""Runs a service as a process: read the configuration, build, serve, drain, exit."""

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
from services.runtime.open_files import allow_open_files
from services.runtime.server import Lifecycle, Mount, listening
from services.runtime.startup import UP, stage_reporter
from services.runtime.tasks import background, cause
from services.runtime.telemetry.logs import LoggingConfig, log_as
from services.runtime.telemetry.scrape import metrics_over_http
from services.runtime.telemetry.tracing import TracingConfig, interceptors, open_tracing

log = logging.getLogger(__name__)

PARENT_LOOK_S = 1.0


@dataclass(frozen=True)
class Unit:
    """A service ready to serve: its mounts, its background work, and how it drains."""

    mounts: Sequence[Mount]
    run: Callable[[], Coroutine[Any, Any, None]]
    drain: Callable[[], Coroutine[Any, Any, None]]


async def nothing() -> None:
    """The background work, or the drain, of a service without one."""


class ServedSettings(Settings):
    """Settings of a service that runs under `run_service`."""

    address: str
    socket: str = ""  # a Unix socket where gRPC is also served; file permissions control access
    metrics_port: int = 0  # 0: no HTTP /metrics
    metrics_host: str = "127.0.0.1"  # of that port; metrics are for operators
    log_level: str = "INFO"
    # Process id of the supervisor, set by it: this process exits when the supervisor does, and
    # reports the stages of its start as marked lines on stderr. 0: none.
    started_by: int = 0
    # time for running requests after the first SIGTERM; a second one exits at once
    drain_s: float = 30.0

    @property
    def metric_labels(self) -> Mapping[str, str]:
        """Labels of all the process's metrics, by the names in its catalogue."""
        return {}


ConfigT = TypeVar("ConfigT", bound=ServedSettings)
Build = Callable[[CollectorRegistry, Tracing], Unit]
Sets = Mapping[str, Mapping[str, str]]  # section → key → value


def run_service(
    kind: type[ConfigT], build: Callable[[ConfigT, CollectorRegistry, Tracing], Unit]
) -> None:
    """Runs a service process to its end. A configuration mistake ends it with one line and status
    2."""
    run_process(kind, [], lambda config, _: partial(build, config))


def run_process(
    kind: type[ConfigT], shared: Sequence[str], prepare: Callable[[ConfigT, Sets], Build]
) -> None:
    """Like `run_service`, for a service that shares sections with others: `prepare` receives the
    settings of each."""
    try:
        check_environment()
        sets = parse_sets(_sets(sys.argv[1:]), [kind.section, *COMMON, *shared])
        config = load(kind, sets[kind.section])
        log_as(kind.section, config.log_level, sets[LoggingConfig.section])
        allow_open_files()
        with closing(open_tracing(sets[TracingConfig.section])) as tracing:
            uvloop.run(serve(config, prepare(config, sets), tracing))
    except (ValueError, ExceptionGroup) as error:
        leave(f"foretoken {kind.section}", error)
    end_at_once()


def end_at_once(status: int = 0) -> NoReturn:
    """Ends the process after its resources are closed, without freeing PyTorch's million objects,
    which takes a second of a busy core and which the system frees anyway."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def leave(name: str, error: Exception) -> NoReturn:
    """Ends the process: a user's mistake with one line and status 2, GaveUp with one line and
    status 1, any other error as it is. Flushes the log first."""
    logging.shutdown()
    reason = cause(error)
    if not isinstance(reason, (ValueError, GaveUp)):
        raise error
    print(f"{name}: {reason}", file=sys.stderr)
    sys.exit(2 if isinstance(reason, ValueError) else 1)


def _sets(argv: Sequence[str]) -> list[str]:
    """`--set section.key=value` pairs, the only option of a service."""
    if len(argv) % 2 or any(flag != "--set" for flag in argv[::2]):
        raise ConfigError("usage: [--set section.key=value]...")
    return list(argv[1::2])


async def serve(config: ServedSettings, build: Build, tracing: Tracing) -> None:
    """Serves until the first signal, then drains until done, the limit, or the second signal."""
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
        stage_reporter(config.started_by)(UP)
        await lifecycle.draining.wait()
        await server.set_serving(False)
        if not await lifecycle.drain(unit.drain(), config.drain_s):
            log.warning("stopping with requests unfinished")


async def _outlive_not(parent: int) -> None:
    """Raises ValueError once the parent process is gone."""
    while True:
        await asyncio.sleep(PARENT_LOOK_S)
        if os.getppid() != parent:
            raise ValueError("the supervising process is gone")

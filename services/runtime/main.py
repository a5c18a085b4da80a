"""Runs a service as a process: read the configuration, build, serve, drain, exit."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
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
from services.runtime.errors import UnrecoverableError
from services.runtime.network.connector import Connector
from services.runtime.network.identity import (
    FOR_CLIENTS,
    NO_TLS,
    AnyIdentity,
    Identity,
    Protection,
    TlsConfig,
    open_identity,
)
from services.runtime.process_limits import raise_open_file_limit
from services.runtime.server import Lifecycle, Mount, listening
from services.runtime.startup import UP, frozen_start, rare_collections, stage_reporter
from services.runtime.tasks import background, root_cause
from services.runtime.telemetry.logs import LoggingConfig, configure_logging
from services.runtime.telemetry.scrape import metrics_over_http
from services.runtime.telemetry.tracing import TracingConfig, interceptors, open_tracing

log = logging.getLogger(__name__)

PARENT_POLL_S = 1.0


async def no_work() -> None:
    """The background work or the drain of a service that has none."""


@dataclass(frozen=True)
class Unit:
    """A service: its servicers, its background work, and its drain. `cycle_free`: its requests
    leave no reference cycles, so that garbage is collected rarely. The health status is SERVING
    once `ready` has returned. `parts`: metrics beside those of the process's registry."""

    mounts: Sequence[Mount]
    run: Callable[[], Coroutine[Any, Any, None]]
    drain: Callable[[], Coroutine[Any, Any, None]]
    cycle_free: bool = False
    ready: Callable[[], Coroutine[Any, Any, None]] = no_work
    parts: Sequence[Part] = ()


class ServedSettings(Settings):
    """Settings of every service that `run_service` runs."""

    address: str
    socket: str = ""  # an additional Unix socket for gRPC; file permissions control access
    metrics_port: int = 0  # of HTTP /metrics; 0: none
    metrics_host: str = "127.0.0.1"  # of metrics_port; local by default, metrics are for operators
    log_level: str = "INFO"
    # Process id of the supervisor, which sets it: this process exits when the supervisor does, and
    # reports the stages of its start as marked lines on stderr. 0: no supervisor.
    started_by: int = 0
    # time for running requests after the first SIGTERM; a second one ends the process immediately
    drain_s: float = 30.0

    @property
    def metric_labels(self) -> Mapping[str, str]:
        """Labels of all metrics of the process, by name."""
        return {}

    @property
    def for_clients(self) -> bool:
        """Whether the service authenticates its callers itself, without certificates of theirs."""
        return False

    @property
    def tls_for_clients(self) -> bool:
        """Whether a service that is for clients shows them the certificate of section `tls`."""
        return False

    @property
    def shares_address(self) -> bool:
        """Whether other processes may listen on the TCP port of `address`, too."""
        return False

    @property
    def hands_over(self) -> bool:
        """Whether other processes serve on the same ports while this one ends."""
        return False


class LabelledSettings(ServedSettings):
    """Settings of a service with one model, or all, which its metrics do not name otherwise."""

    # Label model_name of its metrics, where one gateway serves several models, each with a service
    # of this kind, and collects the metrics of all; empty: none.
    model_label: str = ""

    @property
    def metric_labels(self) -> Mapping[str, str]:
        return {"model_name": self.model_label} if self.model_label else {}


ConfigT = TypeVar("ConfigT", bound=ServedSettings)
Build = Callable[[CollectorRegistry, Tracing, Connector], Unit]
Sets = Mapping[str, Mapping[str, str]]  # section → key → value


def run_service(
    kind: type[ConfigT],
    build: Callable[[ConfigT, CollectorRegistry, Tracing, Connector], Unit],
    sets: Sequence[str] | None = None,
) -> None:
    """Runs a service until the process ends. A mistake in the configuration ends it with a one-line
    message and exit status 2. `sets` are `section.key=value`; None: those of the command line."""
    run_process(kind, [], lambda config, _: partial(build, config), sets)


def run_process(
    kind: type[ConfigT],
    shared: Sequence[str],
    prepare: Callable[[ConfigT, Sets], Build],
    given: Sequence[str] | None = None,
) -> None:
    """Like `run_service`, for a service that also reads the sections `shared`: `prepare` receives
    the settings of all sections."""
    try:
        check_environment()
        given = _set_options(sys.argv[1:]) if given is None else given
        sets = parse_sets(given, [kind.section, *COMMON, *shared])
        config = load(kind, sets[kind.section])
        configure_logging(kind.section, config.log_level, sets[LoggingConfig.section])
        raise_open_file_limit()
        tls = load(TlsConfig, sets[TlsConfig.section])
        with closing(open_tracing(sets[TracingConfig.section])) as tracing:
            uvloop.run(serve(config, prepare(config, sets), tracing, tls))
    except (ValueError, ExceptionGroup) as error:
        exit_with_error(f"foretoken {kind.section}", error)
    exit_immediately()


def exit_immediately(status: int = 0) -> NoReturn:
    """Ends the process without freeing its objects, which takes a second with PyTorch. Resources
    must be closed."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def exit_with_error(name: str, error: Exception) -> NoReturn:
    """Flushes the log and ends the process: a ValueError with a one-line message and exit status 2,
    an UnrecoverableError with exit status 1, any other error with a traceback."""
    logging.shutdown()
    reason = root_cause(error)
    if not isinstance(reason, (ValueError, UnrecoverableError)):
        raise error
    print(f"{name}: {reason}", file=sys.stderr)
    sys.exit(2 if isinstance(reason, ValueError) else 1)


def _set_options(argv: Sequence[str]) -> list[str]:
    """The values of `--set`, the only option of a service."""
    if len(argv) % 2 or any(flag != "--set" for flag in argv[::2]):
        raise ConfigError("usage: [--set section.key=value]...")
    return list(argv[1::2])


async def serve(
    config: ServedSettings, build: Build, tracing: Tracing, tls: TlsConfig = NO_TLS
) -> None:
    """Serves until the first signal, then drains for at most `drain_s` or until the second one."""
    registry, identity = CollectorRegistry(), open_identity(tls)
    unit = build(registry, tracing, Connector(identity))
    protection = _protect(config, identity, tls)
    parts = [Part(registry, config.metric_labels), *unit.parts]
    calls = interceptors(tracing.service(config.section))
    lifecycle = Lifecycle()
    lifecycle.install()
    async with AsyncExitStack() as stack:
        if config.metrics_port:
            http = metrics_over_http(config.metrics_host, config.metrics_port, parts)
            await stack.enter_async_context(http)
        watch = [_watch_supervisor(config.started_by)] if config.started_by else []
        await stack.enter_async_context(background(unit.run(), *watch))
        server = await stack.enter_async_context(
            listening(
                unit.mounts,
                config.address,
                parts=parts,
                interceptors=calls,
                more_addresses=[f"unix:{config.socket}"] if config.socket else [],
                shared=config.shares_address,
                serving=False,
                protection=protection,
            )
        )
        stack.enter_context(frozen_start())
        if unit.cycle_free:
            stack.enter_context(rare_collections())
        log.info("listening on %s", config.address)
        stage_reporter(config.started_by)(UP)
        if await lifecycle.prepare(unit.ready()):
            server.set_serving(True)
        await lifecycle.draining.wait()
        server.set_serving(False)
        work = [unit.drain()]
        if config.hands_over:
            # Clients with an open connection make a new one (GOAWAY), which another process serves.
            # Ends with the last call.
            work.append(server.stop(config.drain_s))
        if not await lifecycle.drain(asyncio.gather(*work), config.drain_s):
            log.warning("stopping with unfinished requests")


def _protect(config: ServedSettings, identity: AnyIdentity | None, tls: TlsConfig) -> Protection:
    """Raises ConfigError for TLS without its files."""
    if not config.for_clients:
        return Protection(identity, open=tls.insecure)
    if not config.tls_for_clients:
        return FOR_CLIENTS
    if not isinstance(identity, Identity):
        raise ConfigError(f"{config.section}.tls: set tls.cert, tls.key and tls.ca, too")
    return replace(FOR_CLIENTS, identity=identity)


async def _watch_supervisor(supervisor: int) -> None:
    """Raises ValueError when the supervisor, the parent process, has exited."""
    while True:
        await asyncio.sleep(PARENT_POLL_S)
        if os.getppid() != supervisor:
            raise ValueError("the supervisor has exited")

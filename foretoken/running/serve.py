"""Runs `foretoken serve`, embedded or as supervised processes, until a signal."""

import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from foretoken.running.console import lines
from foretoken.running.embedded import serve_embedded
from foretoken.running.engines import ENGINES
from foretoken.running.interrupts import quiet_interrupts
from foretoken.running.options import ServeOptions, secrets, sections
from foretoken.running.shutdown import Interrupted
from foretoken.running.supervised import serve_supervised
from services.runtime.config import check_environment, load
from services.runtime.main import exit_immediately
from services.runtime.process_limits import raise_open_file_limit
from services.runtime.server import Lifecycle
from services.runtime.telemetry.logs import LoggingConfig, configure_logging
from services.scheduler.config import SchedulerConfig

Mode = Callable[[ServeOptions, Lifecycle], Coroutine[Any, Any, None]]


def serve(options: ServeOptions) -> None:
    """Runs until Ctrl-C or SIGTERM.

    Raises ConfigError or ValueError for a mistake in the settings, and UnrecoverableError when a
    required process keeps exiting.
    """
    check_environment()
    os.environ.update(secrets(options))
    given = sections(options)
    ENGINES[options.engine].check(load(SchedulerConfig, given["scheduler"]))
    logs = given["logging"]
    configure_logging("serve", options.log_level.upper() or "WARNING", logs)
    if load(LoggingConfig, logs).format == "json":
        lines.log.setLevel(logging.INFO)
    raise_open_file_limit()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    supervised = options.gateways or options.separate or options.cluster
    mode: Mode = serve_supervised if supervised else serve_embedded
    try:
        uvloop.run(_with_signals(mode, options))
    except Interrupted as interrupted:
        exit_immediately(interrupted.status)
    finally:
        quiet_interrupts()  # nothing is left to clean up
    exit_immediately()


async def _with_signals(mode: Mode, options: ServeOptions) -> None:
    lifecycle = Lifecycle()
    lifecycle.install()
    await mode(options, lifecycle)

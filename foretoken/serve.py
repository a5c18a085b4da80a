"""`foretoken serve`: pick embedded or separate, run it, leave cleanly."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from foretoken.embedded import serve_embedded
from foretoken.options import ServeOptions, sections
from foretoken.separate import serve_separate
from services.runtime.config import check_environment
from services.runtime.server import Lifecycle
from services.runtime.telemetry import setup_logging

Mode = Callable[[ServeOptions, Lifecycle], Coroutine[Any, Any, None]]


def serve(options: ServeOptions) -> None:
    """Run until Ctrl-C or SIGTERM. Raises ConfigError or ValueError for a user's mistake."""
    check_environment()
    sections(options)
    setup_logging("serve", "WARNING")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    mode: Mode = serve_separate if options.separate else serve_embedded
    uvloop.run(_with_signals(mode, options))


async def _with_signals(mode: Mode, options: ServeOptions) -> None:
    lifecycle = Lifecycle()
    lifecycle.install()
    await mode(options, lifecycle)

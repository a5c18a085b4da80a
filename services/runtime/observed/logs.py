"""Settings of what a process logs, shared by all of them."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from observability.logs import REPEAT_S, LineFormat, set_up_logging
from services.runtime.config import Settings, load


class LoggingConfig(Settings):
    """Section `logging`."""

    section: ClassVar[str] = "logging"

    format: LineFormat = "text"  # or json: an object a line
    # A warning that repeats is said once in so long, with its count: 1,000 equal lines a minute
    # were seen of one peer that was away.
    repeat_s: float = Field(default=REPEAT_S, gt=0)


def log_as(service: str, level: str, overrides: Mapping[str, str] | None = None) -> None:
    """Set up what this process logs. Raises ConfigError."""
    config = load(LoggingConfig, overrides)
    set_up_logging(service, level, config.format, config.repeat_s)

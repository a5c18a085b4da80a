"""Logging settings of all processes."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from observability.logs import REPEAT_S, LineFormat, set_up_logging
from services.runtime.config import Settings, load


class LoggingConfig(Settings):
    """Section `logging`."""

    section: ClassVar[str] = "logging"

    format: LineFormat = "text"  # or json: one object per line
    # The interval between summaries of a repeated warning.
    repeat_s: float = Field(default=REPEAT_S, gt=0)


def configure_logging(service: str, level: str, overrides: Mapping[str, str] | None = None) -> None:
    """Configures this process's logging. Raises ConfigError."""
    config = load(LoggingConfig, overrides)
    set_up_logging(service, level, config.format, config.repeat_s)

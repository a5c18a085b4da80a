"""What a logger says, as the lines that a process writes of it."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from observability.logs import JsonLines, LogHandler, RepeatFilter


@contextmanager
def lines_of(
    logger: str, level: int = logging.INFO
) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Ask it for what was said so far."""
    stream, message = io.StringIO(), logging.getLogger(logger)
    handler, before = LogHandler(stream, RepeatFilter()), message.level
    handler.setFormatter(JsonLines("test"))
    message.addHandler(handler)
    message.setLevel(level)
    try:
        yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    finally:
        message.removeHandler(handler)
        message.setLevel(before)
        handler.close()

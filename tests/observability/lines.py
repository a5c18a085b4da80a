"""The JSON log lines of a logger."""

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
    """Yields a function that returns the lines logged so far."""
    stream, source = io.StringIO(), logging.getLogger(logger)
    handler, before = LogHandler(stream, RepeatFilter()), source.level
    handler.setFormatter(JsonLines("test"))
    source.addHandler(handler)
    source.setLevel(level)
    try:
        yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    finally:
        source.removeHandler(handler)
        source.setLevel(before)
        handler.close()

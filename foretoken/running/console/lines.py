"""Prints lines for the operator on stderr.

A line goes through the log when its level is INFO or lower or its format is JSON.
"""

import logging
import sys

log = logging.getLogger(__name__)


def print_line(line: str) -> None:
    """Prints one line on stderr, or logs it."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)

"""What a person is told of a running system, a line each on stderr: among the log lines where these
are told at that level, as they are where each line is to be an object."""

import logging
import sys

log = logging.getLogger(__name__)


def say(line: str) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)

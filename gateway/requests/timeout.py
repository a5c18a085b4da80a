"""The client's timeout in the header or metadata `x-request-timeout-s`. Pure."""

from math import isfinite

from services.runtime.errors import InvalidArgument

TIMEOUT_KEY = "x-request-timeout-s"
MAX_SHOWN_CHARS = 40  # of a wrong value in an error


def parse_timeout(text: str) -> float:
    """Seconds. Raises InvalidArgument unless positive and finite."""
    try:
        timeout_s = float(text)
    except ValueError:
        message = f"must be seconds, not {text[:MAX_SHOWN_CHARS]!r}"
        raise InvalidArgument(TIMEOUT_KEY, message) from None
    if not (isfinite(timeout_s) and timeout_s > 0):
        message = f"must be a positive number of seconds, not {timeout_s:g}"
        raise InvalidArgument(TIMEOUT_KEY, message)
    return timeout_s

"""The version of foretoken."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def foretoken_version() -> str:
    """The version of the installed package; `unknown` if it is not installed."""
    try:
        return version("foretoken")
    except PackageNotFoundError:
        return "unknown"

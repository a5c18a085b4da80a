"""The version of foretoken: the only place that queries the installed package."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def foretoken_version() -> str:
    """As in `pyproject.toml` at installation; `unknown` without an installed package."""
    try:
        return version("foretoken")
    except PackageNotFoundError:
        return "unknown"

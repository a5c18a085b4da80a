"""Which foretoken this is: the one place that asks the installed package."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def foretoken_version() -> str:
    """As in `pyproject.toml` when it was installed; `unknown` where it is run without that."""
    try:
        return version("foretoken")
    except PackageNotFoundError:
        return "unknown"

"""TOML files beside the modules of the papers."""

import tomllib
from importlib.resources import files
from typing import Any


def read_document(package: str, name: str) -> dict[str, Any]:
    """Parses a TOML file of a package."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))

"""foretoken: LLM serving that keeps SLAs by foreseeing how long each answer will be."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretoken.client.answers import Answer, Choice, Chunk, Foreseen, Usage
    from foretoken.client.client import AsyncClient, Client
    from foretoken.client.errors import (
        DeadlineExceeded,
        ForetokenError,
        InvalidRequest,
        Overloaded,
        ServerError,
        Unauthenticated,
        Unavailable,
    )

__all__ = [
    "Answer",
    "AsyncClient",
    "Choice",
    "Chunk",
    "Client",
    "DeadlineExceeded",
    "Foreseen",
    "ForetokenError",
    "InvalidRequest",
    "Overloaded",
    "ServerError",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]

_HOMES = ("foretoken.client.client", "foretoken.client.answers", "foretoken.client.errors")


def __getattr__(name: str) -> object:
    """Loaded when first asked for: the command must be able to settle gRPC's options first."""
    if name in __all__:
        for home in map(import_module, _HOMES):
            if hasattr(home, name):
                found: object = getattr(home, name)
                return found
    raise AttributeError(f"module 'foretoken' has no attribute {name!r}")

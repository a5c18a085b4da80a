"""foretoken: SLA-aware LLM serving that schedules by forecast."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretoken.client.answers import Answer, Choice, Chunk, Forecast, Usage
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
    "Forecast",
    "ForetokenError",
    "InvalidRequest",
    "Overloaded",
    "ServerError",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]

_MODULES = ("foretoken.client.client", "foretoken.client.answers", "foretoken.client.errors")


def __getattr__(name: str) -> object:
    """Imports a name on first use, so that the command can set gRPC's options before the import."""
    if name in __all__:
        for module in map(import_module, _MODULES):
            if hasattr(module, name):
                found: object = getattr(module, name)
                return found
    raise AttributeError(f"module 'foretoken' has no attribute {name!r}")

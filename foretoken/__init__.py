"""foretoken: SLA-aware LLM serving that schedules by forecast."""

import os
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
    from foretoken.offline.llm import LLM
    from foretoken.offline.sampling import SamplingParams

__all__ = [
    "LLM",
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
    "SamplingParams",
    "ServerError",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]

_CLIENT = ("foretoken.client.client", "foretoken.client.answers", "foretoken.client.errors")
_OFFLINE = {"LLM": "foretoken.offline.llm", "SamplingParams": "foretoken.offline.sampling"}


def __getattr__(name: str) -> object:
    """Imports a name on first use, so that the command can set gRPC's options before the import."""
    if name in __all__:
        if name in _OFFLINE:  # gRPC would log a warning for every child process; read when imported
            os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        for module in map(import_module, [_OFFLINE[name]] if name in _OFFLINE else _CLIENT):
            if hasattr(module, name):
                found: object = getattr(module, name)
                return found
    raise AttributeError(f"module 'foretoken' has no attribute {name!r}")

"""Writing to a client's connection without a message and a task step for each piece.

The server offers it as an ASGI extension. An endpoint begins its answer as usual, may write pieces
directly in between, and ends it as usual.
"""

from typing import cast
from weakref import ref

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

STREAM = "foretoken.stream"  # the extension's name
HEAD_READ_S = "foretoken.head_read_s"  # another one: when the request's headers were complete


class DirectStream:
    """One answer of unknown length, once its headers and first piece are sent."""

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = ref(cycle)  # it refers to this; a cycle would be freed late, and in a pause

    @property
    def ready(self) -> bool:
        """Whether `write` may be called: the answer is open, and the client reads."""
        cycle = self._cycle()
        if cycle is None:
            return False
        open_ = cycle.response_started and not (cycle.response_complete or cycle.disconnected)
        return bool(open_ and cycle.chunked_encoding) and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Sends a piece that is not empty, as one chunk and in one write; nothing after the end of
        the request."""
        if cycle := self._cycle():
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def head_read_s(scope: Scope) -> float | None:
    """When the headers of a request were complete, on the monotonic clock; None if its server does
    not tell."""
    return cast(float | None, (scope.get("extensions") or {}).get(HEAD_READ_S))


def direct_stream(scope: Scope) -> DirectStream | None:
    """The extension of a request; None if its server has none."""
    return cast(DirectStream | None, (scope.get("extensions") or {}).get(STREAM))

"""The caller of the current request: its external request id and the name of its API key."""

import re
from contextvars import ContextVar
from dataclasses import dataclass
from uuid import uuid4

from observability.logs import begin_log_context

REQUEST_ID = "x-request-id"  # HTTP header and gRPC metadata
VALID_ID = re.compile(r"[!-~]{1,128}")  # safe in a header, a log line and a span


@dataclass(frozen=True, slots=True)
class Caller:
    """Present in every answer, every log line and the span of a request."""

    request_id: str = ""  # the client's own, or a generated one
    key: str = ""  # the name of its key; empty without keys

    @property
    def attributes(self) -> dict[str, str]:
        """Span attributes."""
        named = {"foretoken.client.request_id": self.request_id, "foretoken.client.key": self.key}
        return {name: value for name, value in named.items() if value}


ANONYMOUS = Caller()
_current: ContextVar[Caller] = ContextVar("caller", default=ANONYMOUS)


def current_caller() -> Caller:
    """The caller of the request that this task serves."""
    return _current.get()


def bind_caller(request_id: str, key: str = "") -> Caller:
    """Binds this task and its log lines to a request. An id that is too long or not printable is
    replaced."""
    caller = Caller(request_id if VALID_ID.fullmatch(request_id) else uuid4().hex, key)
    _current.set(caller)
    begin_log_context(caller.request_id, key)
    return caller

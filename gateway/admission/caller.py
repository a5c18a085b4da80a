"""Who calls: the id that the request has outside of this system, and the name of its key."""

import re
from contextvars import ContextVar
from dataclasses import dataclass
from uuid import uuid4

from observability.logs import about_anew

REQUEST_ID = "x-request-id"  # header, and gRPC's metadata
GOOD_ID = re.compile(r"[!-~]{1,128}")  # what stands in a header, a log line and a span as it is


@dataclass(frozen=True, slots=True)
class Caller:
    """Told by every answer, every log line and the span of a request."""

    request_id: str = ""  # the client's own, or one made for it
    key: str = ""  # the name of its key; empty where none is wanted

    @property
    def attributes(self) -> dict[str, str]:
        """Of a span."""
        told = {"foretoken.client.request_id": self.request_id, "foretoken.client.key": self.key}
        return {name: value for name, value in told.items() if value}


NOBODY = Caller()
_calling: ContextVar[Caller] = ContextVar("calling", default=NOBODY)


def caller() -> Caller:
    """Of the request that this task serves."""
    return _calling.get()


def introduce(request_id: str, key: str = "") -> Caller:
    """This task serves that request from here on, and logs in its name. An id that is too long or
    does not print is replaced."""
    calling = Caller(request_id if GOOD_ID.fullmatch(request_id) else uuid4().hex, key)
    _calling.set(calling)
    about_anew(calling.request_id, key)
    return calling

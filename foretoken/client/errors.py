"""What can go wrong for a caller, each with what to do about it."""

import grpc

RETRY_AFTER = "retry-after-s"


class ForetokenError(Exception):
    """Base of all; `str()` is a sentence from the server."""

    def __init__(self, message: str, retry_after_s: float = 0.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvalidRequest(ForetokenError):
    """The request is wrong; the message names the field. Retrying does not help."""


class Unauthenticated(ForetokenError):
    """The server wants an API key, and got none that it knows: give the client `api_key`."""


class Overloaded(ForetokenError):
    """The queue is full; retry after `retry_after_s`."""


class DeadlineExceeded(ForetokenError):
    """The deadline passed before the first token; retry with a later one."""


class Unavailable(ForetokenError):
    """The server cannot be reached or is shutting down; retrying is safe."""


class ServerError(ForetokenError):
    """The serving side failed; retrying is safe."""


_KINDS: dict[grpc.StatusCode, type[ForetokenError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def from_status(
    code: grpc.StatusCode, details: str | None, trailers: object, address: str
) -> ForetokenError:
    """The exception for a call that ended with `code`."""
    kind = _KINDS.get(code, ServerError)
    message = details or code.name
    if kind is Unavailable and "connect" in message.lower():
        message = f"no server answers at {address}; is `foretoken serve` running?"
    return kind(message, _retry_after_s(trailers))


def _retry_after_s(trailers: object) -> float:
    pairs = trailers if isinstance(trailers, tuple | grpc.aio.Metadata) else ()
    return next((float(value) for key, value in pairs if key == RETRY_AFTER), 0.0)

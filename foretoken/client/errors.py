"""The exceptions that the clients raise, and the conversion from gRPC statuses."""

import grpc

RETRY_AFTER = "retry-after-s"


class ForetokenError(Exception):
    """Base of all client errors; `str()` is a sentence from the server."""

    def __init__(self, message: str, retry_after_s: float = 0.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvalidRequest(ForetokenError):
    """The request is invalid; the message names the field. Do not retry."""


class Unauthenticated(ForetokenError):
    """The API key is missing or unknown. Pass `api_key` to the client."""


class Overloaded(ForetokenError):
    """The queue is full. Retry after `retry_after_s`."""


class DeadlineExceeded(ForetokenError):
    """The deadline passed before the first token. Retry with a later deadline."""


class Unavailable(ForetokenError):
    """The server cannot be reached, is draining, or stopped within the answer. Retrying is safe."""


class ServerError(ForetokenError):
    """The server failed. Retrying is safe."""


_ERRORS: dict[grpc.StatusCode, type[ForetokenError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def from_status(status: grpc.Call | grpc.aio.AioRpcError, address: str) -> ForetokenError:
    """Returns the exception for a call to `address` that failed with `status`."""
    kind = _ERRORS.get(status.code(), ServerError)
    if status.code() is grpc.StatusCode.CANCELLED:  # and not by the caller
        return Unavailable(f"{address} stopped before the answer was complete; retry")
    message = status.details() or status.code().name
    if kind is Unavailable and "connect" in message.lower():
        message = f"no server answers at {address}; is `foretoken serve` running?"
    trailers = status.trailing_metadata() or ()
    retry_after_s = next((float(value) for key, value in trailers if key == RETRY_AFTER), 0.0)
    return kind(message, retry_after_s)

"""Errors: an HTTP status, and a body in the format of the requested endpoint: OpenAI's, which names
the field and the reason, or Anthropic's."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from fastapi.responses import JSONResponse

from gateway.admission.caller import current_caller
from gateway.faces.http.responses.errors import PreviousNotFound, ResponseNotFound
from gateway.types.api_keys import Unauthenticated
from gateway.types.errors import ContextOverflow, KeyLimitReached
from services.runtime.errors import Code, InvalidArgument, ServiceError


class BodyTooLarge(ServiceError):
    """A request body above the size limit."""

    def __init__(self, limit_bytes: int):
        super().__init__(Code.INVALID_ARGUMENT, f"the body exceeds {limit_bytes} bytes")


class BodyTooSlow(ServiceError):
    """A request body that stopped arriving or took too long."""

    def __init__(self, size_bytes: int):
        message = f"the body arrived too slowly: {size_bytes} bytes before the timeout"
        super().__init__(Code.DEADLINE_EXCEEDED, message)


class NoSuchObject(ServiceError):
    """A stored object that does not exist, or belongs to another API key."""

    def __init__(self, kind: str, object_id: str):
        super().__init__(Code.NOT_FOUND, f"No such {kind}: {object_id[:64]}")


class ClientDisconnected(Exception):
    """The client closed the connection, so no answer can be sent."""


@dataclass(frozen=True, slots=True)
class HttpStatus:
    """The HTTP status and OpenAI error type of a gRPC status code."""

    status: int
    type: str
    code: str | None = None


STATUSES = {
    Code.INVALID_ARGUMENT: HttpStatus(400, "invalid_request_error"),
    Code.NOT_FOUND: HttpStatus(404, "invalid_request_error", "model_not_found"),
    Code.RESOURCE_EXHAUSTED: HttpStatus(429, "rate_limit_error", "queue_full"),
    Code.DEADLINE_EXCEEDED: HttpStatus(504, "timeout_error", "deadline_exceeded"),
    Code.UNAUTHENTICATED: HttpStatus(401, "invalid_request_error", "invalid_api_key"),
    Code.UNAVAILABLE: HttpStatus(503, "service_unavailable_error", "unavailable"),
}
INTERNAL = HttpStatus(500, "server_error", "internal")

# Errors with an HTTP status that their gRPC code does not determine.
STATUS_BY_TYPE: Mapping[type[ServiceError], HttpStatus] = {
    BodyTooLarge: HttpStatus(413, "invalid_request_error", "body_too_large"),
    BodyTooSlow: HttpStatus(408, "invalid_request_error", "body_too_slow"),
    KeyLimitReached: HttpStatus(429, "rate_limit_error", "rate_limit_exceeded"),
    NoSuchObject: HttpStatus(404, "invalid_request_error"),
    ContextOverflow: HttpStatus(400, "invalid_request_error", "context_length_exceeded"),
    PreviousNotFound: HttpStatus(400, "invalid_request_error", "previous_response_not_found"),
    ResponseNotFound: HttpStatus(404, "invalid_request_error"),
}


def http_status(error: ServiceError) -> HttpStatus:
    if isinstance(error, Unauthenticated) and not error.given:
        return HttpStatus(401, "invalid_request_error")
    return STATUS_BY_TYPE.get(type(error)) or STATUSES.get(error.code, INTERNAL)


MESSAGES_PATH = "/v1/messages"
# Anthropic's error type of an HTTP status.
MESSAGES_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGES_INTERNAL = "api_error"


def error_body(
    error: ServiceError, path: str = "", status: int | None = None
) -> Mapping[str, object]:
    """The body of an error for a client of the endpoint at `path`. A body with a `type` is an event
    of that name within a stream. `status`: the HTTP status, if it is not the error's own."""
    if not path.startswith(MESSAGES_PATH):
        return openai_error_body(error)
    kind = MESSAGES_TYPES.get(status or http_status(error).status, MESSAGES_INTERNAL)
    told = {"type": kind, "message": error.message}
    return {"type": "error", "error": told, "request_id": current_caller().request_id}


def openai_error_body(error: ServiceError) -> dict[str, dict[str, str | None]]:
    status = http_status(error)
    return {
        "error": {
            "message": error.message,
            "type": status.type,
            "param": _param(error),
            "code": status.code,
        }
    }


def error_response(error: ServiceError, path: str = "") -> JSONResponse:
    """The complete answer to a request that failed before its first byte."""
    headers = dict(error.headers)
    if error.retry_after_s:
        headers["Retry-After"] = str(ceil(error.retry_after_s))
    if error.code is Code.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyTooSlow):
        headers["Connection"] = "close"  # the server does not wait for the rest of the body
    return JSONResponse(error_body(error, path), http_status(error).status, headers)


def internal_error() -> ServiceError:
    """What a client receives for a bug; details are only in the log."""
    return ServiceError(Code.INTERNAL, "internal error; see the server's log for details")


def _param(error: ServiceError) -> str | None:
    if isinstance(error, NoSuchObject):
        return "id"
    if error.code is Code.NOT_FOUND:
        return "model"
    return (error.field or None) if isinstance(error, InvalidArgument) else None

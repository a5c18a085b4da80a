"""Errors as OpenAI clients expect them: a status, and a body that names what is wrong."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from fastapi.responses import JSONResponse

from gateway.admission.keys import Unauthenticated
from gateway.requests.errors import ContextOverflow
from services.runtime.errors import Code, InvalidArgument, ServiceError


class BodyTooLarge(ServiceError):
    """A request body over the bound."""

    def __init__(self, limit_bytes: int):
        super().__init__(Code.INVALID_ARGUMENT, f"the body is over {limit_bytes} bytes")


class BodyTooSlow(ServiceError):
    """A request body that stopped coming, or came for too long."""

    def __init__(self, size_bytes: int):
        message = f"the body came too slowly: {size_bytes} bytes until now"
        super().__init__(Code.DEADLINE_EXCEEDED, message)


class ClientGone(Exception):
    """The client hung up; nobody reads the answer."""


@dataclass(frozen=True, slots=True)
class Status:
    """How one gRPC code reads over HTTP."""

    http: int
    type: str
    code: str | None = None


STATUSES = {
    Code.INVALID_ARGUMENT: Status(400, "invalid_request_error"),
    Code.NOT_FOUND: Status(404, "invalid_request_error", "model_not_found"),
    Code.RESOURCE_EXHAUSTED: Status(429, "rate_limit_error", "queue_full"),
    Code.DEADLINE_EXCEEDED: Status(504, "timeout_error", "deadline_exceeded"),
    Code.UNAUTHENTICATED: Status(401, "invalid_request_error", "invalid_api_key"),
    Code.UNAVAILABLE: Status(503, "service_unavailable_error", "unavailable"),
}
INTERNAL = Status(500, "server_error", "internal")


# Errors that have no gRPC code of their own.
SPECIAL: Mapping[type[ServiceError], Status] = {
    BodyTooLarge: Status(413, "invalid_request_error", "body_too_large"),
    BodyTooSlow: Status(408, "invalid_request_error", "body_too_slow"),
    ContextOverflow: Status(400, "invalid_request_error", "context_length_exceeded"),
}


def status_of(error: ServiceError) -> Status:
    if isinstance(error, Unauthenticated) and not error.given:
        return Status(401, "invalid_request_error")
    return SPECIAL.get(type(error)) or STATUSES.get(error.code, INTERNAL)


def error_body(error: ServiceError) -> dict[str, dict[str, str | None]]:
    status = status_of(error)
    return {
        "error": {
            "message": error.message,
            "type": status.type,
            "param": _param(error),
            "code": status.code,
        }
    }


def error_response(error: ServiceError) -> JSONResponse:
    """The whole answer to a request that failed before its first byte."""
    headers = {}
    if error.retry_after_s:
        headers["Retry-After"] = str(ceil(error.retry_after_s))
    if error.code is Code.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyTooSlow):
        headers["Connection"] = "close"  # the rest is not waited for
    return JSONResponse(error_body(error), status_of(error).http, headers)


def unexpected() -> ServiceError:
    """What a client learns of a bug: nothing but that there is one."""
    return ServiceError(Code.INTERNAL, "internal error; the server's log says more")


def _param(error: ServiceError) -> str | None:
    if error.code is Code.NOT_FOUND:
        return "model"
    return (error.field or None) if isinstance(error, InvalidArgument) else None

"""Errors as OpenAI clients expect them: a status, and a body that names what is wrong."""

from dataclasses import dataclass
from math import ceil

from fastapi.responses import JSONResponse

from services.runtime.errors import Code, InvalidArgument, ServiceError


class BodyTooLarge(ServiceError):
    """A request body over the bound."""

    def __init__(self, limit_bytes: int):
        super().__init__(Code.INVALID_ARGUMENT, f"the body is over {limit_bytes} bytes")


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
    Code.UNAVAILABLE: Status(503, "service_unavailable_error", "unavailable"),
}
INTERNAL = Status(500, "server_error", "internal")


def status_of(error: ServiceError) -> Status:
    if isinstance(error, BodyTooLarge):
        return Status(413, "invalid_request_error", "body_too_large")
    return STATUSES.get(error.code, INTERNAL)


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
    return JSONResponse(error_body(error), status_of(error).http, headers)


def unexpected() -> ServiceError:
    """What a client learns of a bug: nothing but that there is one."""
    return ServiceError(Code.INTERNAL, "internal error; the server's log says more")


def _param(error: ServiceError) -> str | None:
    if error.code is Code.NOT_FOUND:
        return "model"
    return (error.field or None) if isinstance(error, InvalidArgument) else None

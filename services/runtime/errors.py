"""Errors: the status and message that exceptions of servicers become."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from math import ceil
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

log = logging.getLogger(__name__)

RETRY_AFTER = "retry-after-s"
MAX_RETRY_S = 86_400.0  # clients get no longer wait: that of a server without workers is infinite
Code = grpc.StatusCode
MALFORMED = object()  # in place of a request that cannot be parsed
UNREADABLE = "the message cannot be parsed; use the .proto files of this version"


class ServiceError(Exception):
    """A status other than OK. `message` is shown to the caller. `headers` accompany it, over gRPC
    as trailing metadata."""

    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, code: grpc.StatusCode, message: str, retry_after_s: float = 0.0):
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = min(retry_after_s, MAX_RETRY_S)


class InvalidArgument(ServiceError):
    """An invalid field of a request."""

    def __init__(self, field: str, message: str):
        super().__init__(Code.INVALID_ARGUMENT, f"{field}: {message}" if field else message)
        self.field = field


class UnrecoverableError(Exception):
    """Ends the process with a one-line message and exit status 1; not a mistake of the user."""


OnInvalid = Callable[[str, str], None]  # a method of a service, and the field


def _ignore(field: str) -> None:
    """Counts nothing."""


class ErrorInterceptor(aio.ServerInterceptor):
    """Turns exceptions of all calls of a server into a status: ServiceErrors into theirs, others
    into INTERNAL. `on_invalid`, by service, is called for each invalid message."""

    def __init__(self, on_invalid: Mapping[str, OnInvalid]):
        self._on_invalid = on_invalid

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        service, _, method = handler_call_details.method.strip("/").rpartition("/")
        told = self._on_invalid.get(service)
        handler = await continuation(handler_call_details)
        return guard(_parsing(handler), partial(told, method) if told else _ignore)


def guard(handler: Any, on_invalid: Callable[[str], None] = _ignore) -> Any:
    """The method handler, with exceptions turned into a status. `on_invalid` is called with the
    field of an invalid message."""
    return wrap_handler(
        handler,
        partial(_guard_unary, on_invalid=on_invalid),
        partial(_guard_stream, on_invalid=on_invalid),
    )


def _parsing(handler: Any) -> Any:
    """The method handler, which gets MALFORMED for a request that cannot be parsed: gRPC would
    answer it with INTERNAL, and log a traceback. In a stream of requests, it raises DecodeError."""
    parse = handler and handler.request_deserializer
    if parse is None or handler.request_streaming:
        return handler

    def parse_or_malformed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return MALFORMED

    return handler._replace(request_deserializer=parse_or_malformed)


def wrap_handler(handler: Any, unary: Callable[[Any], Any], stream: Callable[[Any], Any]) -> Any:
    """The method handler with its function replaced by `unary(function)`, or by `stream(function)`
    if it streams responses. None for None."""
    if handler is None:
        return None
    kind = (handler.request_streaming, handler.response_streaming)
    inner, make = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }[kind]
    behaviour = stream(inner) if handler.response_streaming else unary(inner)
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


def _guard_unary(
    inner: Callable[..., Awaitable[Any]], on_invalid: Callable[[str], None]
) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        try:
            _require_parsed(request)
            return await inner(request, context)
        except aio.BaseError:  # an abort, or the end of the server: the call has its status
            raise
        except Exception as error:
            return await _abort(context, error, on_invalid)

    return call


def _guard_stream(
    inner: Callable[..., AsyncIterator[Any]], on_invalid: Callable[[str], None]
) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            _require_parsed(request)
            async for response in inner(request, context):
                yield response
        except aio.BaseError:
            raise
        except Exception as error:
            await _abort(context, error, on_invalid)

    return call


def _require_parsed(request: Any) -> None:
    if request is MALFORMED:
        raise InvalidArgument("", UNREADABLE)


def _trailers(error: ServiceError) -> tuple[tuple[str, str], ...]:
    """The retry time in seconds, exact and as HTTP has it, and the error's headers."""
    wait_s = error.retry_after_s
    retry = ((RETRY_AFTER, f"{wait_s:g}"), ("retry-after", str(ceil(wait_s)))) if wait_s else ()
    return (*retry, *error.headers.items())


async def _abort(context: Any, error: Exception, on_invalid: Callable[[str], None]) -> None:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, DecodeError):
        error = InvalidArgument("", UNREADABLE)
    if isinstance(error, InvalidArgument):
        on_invalid(error.field)
    if isinstance(error, ServiceError):
        await context.abort(error.code, error.message, _trailers(error))
    log.exception("request failed", exc_info=error)
    await context.abort(Code.INTERNAL, "internal error; see the server's log for details")

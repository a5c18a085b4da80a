"""Errors: the status and message that exceptions of servicers become."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

log = logging.getLogger(__name__)

RETRY_AFTER = "retry-after-s"
Code = grpc.StatusCode


class ServiceError(Exception):
    """A status other than OK. `message` is shown to the caller."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_after_s: float = 0.0):
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidArgument(ServiceError):
    """An invalid field of a request."""

    def __init__(self, field: str, message: str):
        super().__init__(Code.INVALID_ARGUMENT, f"{field}: {message}" if field else message)
        self.field = field


class UnrecoverableError(Exception):
    """Ends the process with a one-line message and exit status 1; not a mistake of the user."""


class ErrorInterceptor(aio.ServerInterceptor):
    """Turns exceptions of all calls of a server into a status: ServiceErrors into theirs, others
    into INTERNAL."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        return guard(await continuation(handler_call_details))


def guard(handler: Any) -> Any:
    """The method handler, with exceptions turned into a status."""
    return wrap_handler(handler, _guard_unary, _guard_stream)


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


def _guard_unary(inner: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await inner(request, context)
        except aio.BaseError:  # an abort, or the end of the server: the call has its status
            raise
        except Exception as error:
            return await _abort(context, error)

    return call


def _guard_stream(inner: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in inner(request, context):
                yield response
        except aio.BaseError:
            raise
        except Exception as error:
            await _abort(context, error)

    return call


async def _abort(context: Any, error: Exception) -> None:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ServiceError):
        trailer = ((RETRY_AFTER, f"{error.retry_after_s:g}"),) if error.retry_after_s else ()
        await context.abort(error.code, error.message, trailer)
    log.exception("request failed", exc_info=error)
    await context.abort(Code.INTERNAL, "internal error; see the server's log for details")

"""Rejects gRPC calls without a valid API key, for every service of the port."""

import logging
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from gateway.admission.keyring import Keyring
from gateway.faces.grpc.metadata import read_key, read_metadata, set_caller
from gateway.types.api_keys import Unauthenticated
from services.runtime.errors import guard, wrap_handler
from services.runtime.telemetry.scrape import TELEMETRY

log = logging.getLogger(__name__)

# Health checks and reflection reveal nothing about requests.
OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")
TELEMETRY_PREFIX = f"/{TELEMETRY}/"
UNIX = "unix:"  # a peer over a socket file: the permissions of the file control access


class KeyInterceptor(aio.ServerInterceptor):
    """Checks the metadata's `authorization: Bearer KEY` before a call's message is read.

    Metrics over this port need a key whatever `metrics_open` says, because scrapers use HTTP. Only
    over a Unix socket they need none.
    """

    def __init__(self, keyring: Keyring):
        self._keyring = keyring

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not self._keyring.required or method.startswith(OPEN_SERVICES):
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        try:
            self._keyring.check(read_key(metadata))
        except Unauthenticated as refusal:
            return _refuse_calls(handler, refusal, method.startswith(TELEMETRY_PREFIX))
        return handler


def _refuse_calls(handler: Any, refusal: Unauthenticated, except_unix: bool) -> Any:
    """A handler that raises `refusal`; with `except_unix`, not for peers over a Unix socket."""

    async def refuse(context: Any) -> None:
        await set_caller(context, read_metadata(context), "")
        if refusal.given:
            log.warning("%s sent a wrong API key", context.peer())
        raise refusal

    def unary(inner: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            if except_unix and context.peer().startswith(UNIX):
                return await inner(request, context)
            return await refuse(context)

        return call

    def stream(inner: Any) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            await refuse(context)
            yield

        return call

    return guard(wrap_handler(handler, unary, stream))

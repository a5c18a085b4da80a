"""Who calls over gRPC without a good key is refused, whichever service it is for."""

import logging
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from gateway.admission.keyring import Keyring
from gateway.admission.keys import Unauthenticated
from gateway.requests.metadata import greet, key_of, metadata_of
from services.runtime.errors import guard, wrapped
from services.runtime.observed.scrape import TELEMETRY

log = logging.getLogger(__name__)

# Health checks and reflection tell nothing of anybody's requests.
OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")
SCRAPING = f"/{TELEMETRY}/"
UNIX = "unix:"  # a peer that came by a socket file, whose rights say who may


class KeyedCalls(aio.ServerInterceptor):
    """Looks at the metadata's `authorization: Bearer KEY` before anything of a call is read.

    What a process counts, asked for by the way of this port, wants a key too, `metrics_open` or
    not: scrapers come by HTTP. Only over a Unix socket it does not.
    """

    def __init__(self, keyring: Keyring):
        self._keyring = keyring

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not self._keyring.wanted or method.startswith(OPEN):
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        try:
            self._keyring.check(key_of(metadata))
        except Unauthenticated as refusal:
            return _refusing(handler, refusal, method.startswith(SCRAPING))
        return handler


def _refusing(handler: Any, refusal: Unauthenticated, unless_unix: bool) -> Any:
    async def refuse(context: Any) -> None:
        await greet(context, metadata_of(context), "")
        if refusal.given:
            log.warning("%s gave a wrong API key", context.peer())
        raise refusal

    def unary(inner: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            if unless_unix and context.peer().startswith(UNIX):
                return await inner(request, context)
            return await refuse(context)

        return call

    def stream(inner: Any) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            await refuse(context)
            yield

        return call

    return guard(wrapped(handler, unary, stream))

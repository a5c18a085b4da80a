"""Which roles may call which method of a service that demands certificates."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from typing import Any

from grpc import aio

from services.runtime.errors import Code, ServiceError, guard, wrap_handler
from services.runtime.network.identity import Role, roles_of

SERVICE = "/foretoken.v1."
ANY = frozenset(Role)
OF_SCHEDULER = frozenset({Role.SCHEDULER})
OF_GATEWAY = frozenset({Role.GATEWAY})
READERS = frozenset({Role.GATEWAY, Role.OPERATOR})
FORECASTERS = frozenset({Role.SCHEDULER, Role.PICKER})

# Methods without an entry may be called by operators only.
ALLOWED: Mapping[str, Set[Role]] = {
    f"{SERVICE}Scheduler/Submit": OF_GATEWAY,
    f"{SERVICE}Scheduler/Attach": frozenset({Role.WORKER}),
    f"{SERVICE}Scheduler/GetFleet": READERS,
    f"{SERVICE}Scheduler/Why": READERS,
    f"{SERVICE}Scheduler/LoadAdapter": READERS,
    f"{SERVICE}Scheduler/UnloadAdapter": READERS,
    f"{SERVICE}Worker/Stream": OF_GATEWAY,
    f"{SERVICE}Predictor/Forecast": FORECASTERS,
    f"{SERVICE}Predictor/Improve": FORECASTERS,
    f"{SERVICE}Predictor/Observe": FORECASTERS,
    f"{SERVICE}Estimator/GetCostModel": OF_SCHEDULER,
    f"{SERVICE}Estimator/WatchCostModel": OF_SCHEDULER,
    f"{SERVICE}Estimator/Observe": OF_SCHEDULER,
    f"{SERVICE}Batcher/Arrange": OF_SCHEDULER,
    f"{SERVICE}Telemetry/Scrape": ANY,
    "/grpc.health.v1.Health/Check": ANY,
    "/grpc.health.v1.Health/Watch": ANY,
}
OPERATORS = frozenset({Role.OPERATOR})
OTHER_NAMES = "x509_subject_alternative_name"
NAME_FIELDS = ("x509_common_name", OTHER_NAMES)

Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]


class Authorisation(aio.ServerInterceptor):
    """Refuses calls over TLS by certificates without an allowed role. Permissions of the file
    protect a Unix socket."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        allowed = ALLOWED.get(method, OPERATORS)

        def unary(inner: Unary) -> Unary:
            async def call(request: Any, context: Any) -> Any:
                _check(context, method, allowed)
                return await inner(request, context)

            return call

        def stream(inner: Stream) -> Stream:
            async def call(request: Any, context: Any) -> AsyncIterator[Any]:
                _check(context, method, allowed)
                async for response in inner(request, context):
                    yield response

            return call

        return guard(wrap_handler(await continuation(handler_call_details), unary, stream))


def _check(context: Any, method: str, allowed: Set[Role]) -> None:
    """Raises ServiceError."""
    if context.peer().startswith("unix:"):
        return
    roles = roles_of(context.auth_context().get(OTHER_NAMES, ()))
    if not roles & allowed:
        names = ", ".join(sorted(roles)) or "none"
        needed = " or ".join(sorted(allowed))
        message = f"{method} is for the role {needed}; the certificate has {names}"
        raise ServiceError(Code.PERMISSION_DENIED, message)


def peer_name(context: Any) -> str:
    """The name in the certificate of a call's peer: the common one, else the first of the others;
    empty without a certificate."""
    fields = context.auth_context()
    names = [name for field in NAME_FIELDS for name in fields.get(field, ())]
    return names[0].decode(errors="replace") if names else ""

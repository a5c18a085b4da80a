"""Which callers may call which method of a service that demands certificates, or a token."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from functools import partial
from typing import Any

from grpc import aio

from services.runtime.errors import Code, ServiceError, guard, wrap_handler
from services.runtime.network.identity import AnyIdentity, Identity, Role, names_of, roles_of
from services.runtime.network.token_identity import TOKEN_KEY, TokenIdentity

SERVICE = "/foretoken.v1."
HEALTH = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
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
    **dict.fromkeys(HEALTH, ANY),
}
OPERATORS = frozenset({Role.OPERATOR})

Check = Callable[[Any, str], None]  # a call's context and method; raises ServiceError
Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]


class Authorisation(aio.ServerInterceptor):
    """Refuses calls by certificates without an allowed role, or without the token. Permissions of
    the file protect a Unix socket."""

    def __init__(self, identity: AnyIdentity):
        self._check = _check_by(identity)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method = handler_call_details.method

        def check(context: Any) -> None:
            if not context.peer().startswith("unix:"):
                self._check(context, method)

        def unary(inner: Unary) -> Unary:
            async def call(request: Any, context: Any) -> Any:
                check(context)
                return await inner(request, context)

            return call

        def stream(inner: Stream) -> Stream:
            async def call(request: Any, context: Any) -> AsyncIterator[Any]:
                check(context)
                async for response in inner(request, context):
                    yield response

            return call

        return guard(wrap_handler(await continuation(handler_call_details), unary, stream))


def _check_by(identity: AnyIdentity) -> Check:
    match identity:
        case Identity():
            return _check_role
        case TokenIdentity():
            return partial(_check_token, identity)


def _check_role(context: Any, method: str) -> None:
    """Raises ServiceError."""
    roles, allowed = roles_of(names_of(context)), ALLOWED.get(method, OPERATORS)
    if not roles & allowed:
        found = ", ".join(sorted(roles)) or "none"
        needed = " or ".join(sorted(allowed))
        message = f"{method} is for the role {needed}; the certificate has {found}"
        raise ServiceError(Code.PERMISSION_DENIED, message)


def _check_token(identity: TokenIdentity, context: Any, method: str) -> None:
    """Raises ServiceError. Probes of a platform, and gRPC's own watch of a leader, send no token:
    health needs none."""
    given = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
    if method not in HEALTH and not identity.accepts(given):
        found = "another one" if given else "none"
        message = f"{method} needs the token of tls.token_file; the call has {found}"
        raise ServiceError(Code.UNAUTHENTICATED, message)

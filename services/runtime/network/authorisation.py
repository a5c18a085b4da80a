"""Which callers may call which method of a service that demands certificates, or tokens."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from grpc import aio

from services.runtime.errors import Code, ServiceError, guard, wrap_handler
from services.runtime.network.identity import AnyIdentity, Identity, Role, names_of, roles_of
from services.runtime.network.token_identity import TOKEN_KEY, TOKEN_NAME, TokenIdentity

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


def callers_of(role: Role) -> Set[Role]:
    """The roles that call a service of the role, if it has methods here. READERS, as they collect
    metrics, call each."""
    own = f"{SERVICE}{role.title()}/"
    allowed = [roles for method, roles in ALLOWED.items() if method.startswith(own)]
    return READERS.union(*allowed) if allowed else frozenset()


# The context that the servicer gets, from a call's context and method; raises ServiceError.
Check = Callable[[Any, str], Any]
Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]


class Authorisation(aio.ServerInterceptor):
    """Refuses calls by certificates or tokens without an allowed role. Permissions of the file
    protect a Unix socket."""

    def __init__(self, identity: AnyIdentity):
        self._check = _check_by(identity)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method = handler_call_details.method

        def checked(context: Any) -> Any:
            if context.peer().startswith("unix:"):
                return context
            return self._check(context, method)

        def unary(inner: Unary) -> Unary:
            async def call(request: Any, context: Any) -> Any:
                return await inner(request, checked(context))

            return call

        def stream(inner: Stream) -> Stream:
            async def call(request: Any, context: Any) -> AsyncIterator[Any]:
                async for response in inner(request, checked(context)):
                    yield response

            return call

        return guard(wrap_handler(await continuation(handler_call_details), unary, stream))


class _NamedContext:
    """A call's context, with the name of the caller's token in place of the connection's
    authentication."""

    def __init__(self, context: Any, name: str):
        self._context, self._name = context, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._context, attribute)

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return {TOKEN_NAME: (self._name.encode(),)}


def _check_by(identity: AnyIdentity) -> Check:
    match identity:
        case Identity():
            return _check_certificate
        case TokenIdentity():
            return partial(_check_token, identity)


def _check_certificate(context: Any, method: str) -> Any:
    """Raises ServiceError."""
    _require_role(method, roles_of(names_of(context)), "certificate")
    return context


def _check_token(identity: TokenIdentity, context: Any, method: str) -> Any:
    """Raises ServiceError. Probes of a platform, and gRPC's own watch of a leader, send no token:
    health needs none."""
    if method in HEALTH:
        return context
    given = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
    token = identity.find(given)
    if token is None:
        found = "another one" if given else "none"
        message = f"{method} needs a token of tls.token_file; the call has {found}"
        raise ServiceError(Code.UNAUTHENTICATED, message)
    _require_role(method, {Role(token.role)} if token.role else ANY, "token")
    return _NamedContext(context, token.name) if token.name else context


def _require_role(method: str, roles: Set[Role], proof: str) -> None:
    """Raises ServiceError. `proof`: what the roles are from."""
    allowed = ALLOWED.get(method, OPERATORS)
    if not roles & allowed:
        found = ", ".join(sorted(roles)) or "none"
        needed = " or ".join(sorted(allowed))
        message = f"{method} is for the role {needed}; the {proof} has {found}"
        raise ServiceError(Code.PERMISSION_DENIED, message)

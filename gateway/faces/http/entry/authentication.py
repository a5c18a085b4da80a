"""Rejects HTTP requests without a valid API key before their body is read."""

import logging
from collections.abc import Container

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admission.caller import bind_caller, current_caller
from gateway.admission.keyring import Keyring
from gateway.faces.http.errors import error_response
from gateway.types.api_keys import Unauthenticated, parse_bearer

log = logging.getLogger(__name__)


class KeyAuthentication:
    """Requires a key for every path, existing or not, that is not in `open_paths`."""

    def __init__(self, app: ASGIApp, keyring: Keyring, open_paths: Container[str]):
        self._app, self._keyring, self._open_paths = app, keyring, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self._app
        if (
            scope["type"] == "http"
            and self._keyring.required
            and scope["path"] not in self._open_paths
        ):
            try:
                name = self._keyring.check(
                    parse_bearer(Headers(scope=scope).get("authorization", ""))
                )
                bind_caller(current_caller().request_id, name)
            except Unauthenticated as refusal:
                if refusal.given:
                    host, *_ = scope.get("client") or ("an unknown client",)
                    log.warning("%s sent a wrong API key", host)
                respond = error_response(refusal)
        await respond(scope, receive, send)

"""Who asks over HTTP without a good key is refused, before anything of the body is read."""

import logging
from collections.abc import Container

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admission.caller import caller, introduce
from gateway.admission.keyring import Keyring
from gateway.admission.keys import Unauthenticated, bearer
from gateway.faces.http.errors import error_response

log = logging.getLogger(__name__)


class Keys:
    """Lets pass who asks for what is open to all, or brings a key: what is not named as open, wants
    one, whether it is there or not."""

    def __init__(self, app: ASGIApp, keyring: Keyring, open_paths: Container[str]):
        self._app, self._keyring, self._open = app, keyring, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and self._keyring.wanted and scope["path"] not in self._open:
            try:
                name = self._keyring.check(bearer(Headers(scope=scope).get("authorization", "")))
                introduce(caller().request_id, name)
            except Unauthenticated as refusal:
                if refusal.given:
                    host, *_ = scope.get("client") or ("somebody",)
                    log.warning("%s gave a wrong API key", host)
                answer = error_response(refusal)
        await answer(scope, receive, send)

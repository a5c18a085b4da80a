"""The endpoints that are asked often, without the layers of the framework around the others."""

from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.faces.http.errors import ClientDisconnected, error_response, internal_error
from services.runtime.errors import ServiceError

CLIENT_CLOSED_REQUEST = 499  # the client does not receive it

Endpoint = Callable[[Request], Awaitable[Response]]
Endpoints = Mapping[tuple[str, str], Endpoint]  # by method and path


class HotPaths:
    """Answers the requests to `endpoints`; passes all others to `app`, which describes these
    endpoints, too.

    Routing, dependencies and exit stacks of the framework cost as much as reading the request.
    """

    def __init__(self, app: ASGIApp, endpoints: Endpoints):
        self._app, self._endpoints = app, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        endpoint = self._endpoints.get((scope["method"], scope["path"])) if is_http else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive, send))
        except ServiceError as error:
            response = error_response(error, scope["path"])
        except ClientDisconnected:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception:
            await error_response(internal_error(), scope["path"])(scope, receive, send)
            raise  # the server logs it
        await response(scope, receive, send)

"""The endpoints that generate text, without the layers of the framework around the others."""

from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.faces.http.errors import ClientDisconnected, error_response, internal_error
from services.runtime.errors import ServiceError

CLIENT_CLOSED_REQUEST = 499  # the client does not receive it

Endpoint = Callable[[Request], Awaitable[Response]]


class HotPaths:
    """Answers POST requests to `endpoints`, by path; passes all others to `app`, which describes
    these endpoints, too.

    Routing, dependencies and exit stacks of the framework cost as much as reading the request.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]):
        self._app, self._endpoints = app, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if posted else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive, send))
        except ServiceError as error:
            response = error_response(error)
        except ClientDisconnected:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception:
            await error_response(internal_error())(scope, receive, send)
            raise  # the server logs it
        await response(scope, receive, send)

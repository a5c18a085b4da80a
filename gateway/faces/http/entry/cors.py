"""Cross-origin requests from the origins that the config allows."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from gateway.admission.caller import REQUEST_ID
from gateway.config import ANY_ORIGIN
from gateway.faces.http.errors import error_body
from services.runtime.errors import InvalidArgument

EXPOSED_HEADERS = (REQUEST_ID, "retry-after", "www-authenticate")
PREFLIGHT_MAX_AGE_S = 600


class Cors(CORSMiddleware):
    """Starlette's middleware with JSON errors. Credentials, such as a proxy's cookies, are allowed
    from named origins but not with `*`."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]):
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            allow_credentials=ANY_ORIGIN not in origins,
            expose_headers=EXPOSED_HEADERS,
            max_age=PREFLIGHT_MAX_AGE_S,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        error = InvalidArgument("", bytes(response.body).decode())
        headers = {k: v for k, v in response.headers.items() if not k.startswith("content-")}
        return JSONResponse(error_body(error), response.status_code, headers)

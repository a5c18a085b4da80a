"""Pages of other origins may ask, where the config names these."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from gateway.admission.caller import REQUEST_ID
from gateway.config import ANY_ORIGIN
from gateway.faces.http.errors import error_body
from services.runtime.errors import InvalidArgument

TOLD = (REQUEST_ID, "retry-after", "www-authenticate")  # headers that a page may read
PREFLIGHT_KEPT_S = 600


class Cors(CORSMiddleware):
    """Starlette's; what it refuses is said as all else. Cookies and the like, of which we have
    none, a proxy's may come along from origins that are named, and never with `*`."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]):
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            allow_credentials=ANY_ORIGIN not in origins,
            expose_headers=TOLD,
            max_age=PREFLIGHT_KEPT_S,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        made = super().preflight_response(request_headers)
        if made.status_code < 400:
            return made
        fault = InvalidArgument("", bytes(made.body).decode())
        headers = {k: v for k, v in made.headers.items() if not k.startswith("content-")}
        return JSONResponse(error_body(fault), made.status_code, headers)

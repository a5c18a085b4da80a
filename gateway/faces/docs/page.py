"""`/docs`: a page that the browser renders from /openapi.json, without other servers."""

from fastapi import FastAPI, Request, Response

from gateway.faces.ui.files import INDEX, page_files
from gateway.faces.ui.routes import send_file

FILES = page_files("gateway.faces.docs", "static")
DOCS_PATHS = frozenset(("/docs", *(f"/docs/{name}" for name in FILES)))


def add_docs(app: FastAPI) -> None:
    """Adds the page, its script and its style sheet."""

    @app.get("/docs", include_in_schema=False)
    async def index(request: Request) -> Response:
        return send_file(FILES, INDEX, request)

    @app.get("/docs/{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        return send_file(FILES, name, request)

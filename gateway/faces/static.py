"""Static pages, read once at import: a request path never reaches the file system."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import PurePath

from fastapi import FastAPI, HTTPException, Request, Response

INDEX = "index.html"
NOT_FOUND = 404
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# With `no-cache` a browser revalidates each time; an unchanged etag costs a 304.
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    media_type: str
    etag: str  # quoted, as HTTP writes it

    def is_known(self, if_none_match: str) -> bool:
        """Whether the browser's If-None-Match header names this content."""
        known = (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))
        return any(tag in (self.etag, "*") for tag in known)


Files = Mapping[str, StaticFile]


def read_files(package: str, folder: str) -> Files:
    """The files of a page by name."""
    found: dict[str, StaticFile] = {}
    for entry in files(package).joinpath(folder).iterdir():
        if media_type := MEDIA_TYPES.get(PurePath(entry.name).suffix):
            content = entry.read_bytes()
            etag = f'"{sha256(content).hexdigest()[:32]}"'
            found[entry.name] = StaticFile(content, media_type, etag)
    return found


def list_paths(path: str, page: Files) -> Collection[str]:
    """The URL paths of a page whose index is at `path`."""
    return {path.rstrip("/"), path, *(f"{path.rstrip('/')}/{name}" for name in page)}


def add_files(app: FastAPI, path: str, page: Files) -> None:
    """Serves a page: its index at `path`, the other files below it."""

    @app.get(path, include_in_schema=False)
    async def index(request: Request) -> Response:
        return _send_file(page, INDEX, request)

    @app.get(path.rstrip("/") + "/{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        return _send_file(page, name, request)


def _send_file(page: Files, name: str, request: Request) -> Response:
    """One file, or a 304 if the browser has it. Raises HTTPException for an unknown name."""
    found = page.get(name)
    if found is None:
        raise HTTPException(NOT_FOUND)
    headers = HEADERS | {"etag": found.etag}
    if found.is_known(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)

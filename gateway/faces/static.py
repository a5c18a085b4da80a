"""Static pages, read once when the app is built: a request path never reaches the file system."""

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


@dataclass(frozen=True, slots=True)
class Page:
    """The files of a page by name. Its index is at `path`, the other files below it."""

    path: str
    files: Mapping[str, StaticFile]

    @property
    def paths(self) -> Collection[str]:
        """All URL paths of the page."""
        folder = self.path.rstrip("/")
        return {folder, self.path, *(f"{folder}/{name}" for name in self.files)}


def read_page(path: str, package: str, folder: str) -> Page:
    """Reads a page from a folder of a package."""
    found: dict[str, StaticFile] = {}
    for entry in files(package).joinpath(folder).iterdir():
        if media_type := MEDIA_TYPES.get(PurePath(entry.name).suffix):
            content = entry.read_bytes()
            etag = f'"{sha256(content).hexdigest()[:32]}"'
            found[entry.name] = StaticFile(content, media_type, etag)
    return Page(path, found)


def add_page(app: FastAPI, page: Page) -> None:
    """Serves a page."""

    @app.get(page.path, include_in_schema=False)
    async def index(request: Request) -> Response:
        return _send_file(page, INDEX, request)

    @app.get(page.path.rstrip("/") + "/{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        return _send_file(page, name, request)


def _send_file(page: Page, name: str, request: Request) -> Response:
    """One file, or a 304 if the browser has it. Raises HTTPException for an unknown name."""
    found = page.files.get(name)
    if found is None:
        raise HTTPException(NOT_FOUND)
    headers = HEADERS | {"etag": found.etag}
    if found.is_known(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)

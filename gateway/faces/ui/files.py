"""The page's files, read once at import: a request path never reaches the file system."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import PurePath

INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str
    etag: str  # quoted, as HTTP writes it

    def is_known(self, if_none_match: str) -> bool:
        """Whether the browser's If-None-Match header names this content."""
        known = (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))
        return any(tag in (self.etag, "*") for tag in known)


def page_files(package: str = "gateway.faces.ui", folder: str = "page") -> Mapping[str, PageFile]:
    """All files of a page by name."""
    return {
        entry.name: _page_file(entry.read_bytes(), MEDIA_TYPES[PurePath(entry.name).suffix])
        for entry in files(package).joinpath(folder).iterdir()
        if PurePath(entry.name).suffix in MEDIA_TYPES
    }


def _page_file(content: bytes, media_type: str) -> PageFile:
    return PageFile(content, media_type, f'"{sha256(content).hexdigest()[:32]}"')

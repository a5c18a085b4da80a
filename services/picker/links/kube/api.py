"""KubeApi: lists and watches of Kubernetes' API, as its documentation of API concepts describes
them."""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx2 as httpx

from services.picker.core.inference_pool import Object
from services.picker.links.kube.access import KubeAccess

CONNECT_S = 5.0
ANSWER_S = 10.0
LIST_S = 60.0  # all pages of a list
# A watch ends after so long and is opened again where it ended, so that a connection that died
# without notice is found.
WATCH_S = 60
PAGE = 250  # objects of one answer
MAX_BYTES = 16 * 2**20  # of one answer or event; objects have at most 1.5 MiB
TOKEN = re.compile(rb"[!-~]+")


class ApiError(Exception):
    """An answer without what was asked for, in one sentence. `status`: of HTTP, 0 without one."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Collection:
    """Objects of one kind; `query` selects some of them."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """A change, or with kind BOOKMARK only a new version."""

    kind: str
    item: Object

    @property
    def version(self) -> str:
        return str(self.item["metadata"]["resourceVersion"])


class KubeApi:
    """Connections to one API server. The token is read for each request, because Kubernetes
    replaces it about once an hour."""

    def __init__(self, access: KubeAccess):
        """Raises ValueError for a file that holds no certificates."""
        self._token_file = access.token_file
        self._http = httpx.AsyncClient(
            base_url=access.url,
            verify=_certificates(access.ca_file),
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S, pool=None),
            trust_env=False,  # the API of a pod's own cluster is behind no proxy
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def list(self, collection: Collection, each: Callable[[Object], None]) -> str:
        """Calls `each` with all objects, and returns the version of the list. Raises ApiError."""
        try:
            async with asyncio.timeout(LIST_S):
                return await self._read_pages(collection, each)
        except TimeoutError:
            raise ApiError(f"its list takes over {LIST_S:g} s") from None

    async def _read_pages(self, collection: Collection, each: Callable[[Object], None]) -> str:
        following = ""
        while True:
            query = {**collection.query, "limit": str(PAGE)}
            if following:
                query["continue"] = following
            async with self._opened(collection.path, query, ANSWER_S) as response:
                page = _parse(b"".join([part async for part in _bounded(response)]))
            try:
                for item in page["items"]:
                    each(item)
                following = page["metadata"].get("continue", "")
                version = str(page["metadata"]["resourceVersion"])
            except (KeyError, TypeError, AttributeError):
                raise ApiError("its answer is no list of objects") from None
            if not following:
                return version

    @asynccontextmanager
    async def watch(
        self, collection: Collection, version: str
    ) -> AsyncIterator[AsyncGenerator[Event, None]]:
        """Opens a watch of the changes after a version; its events end when the server ends it.
        Raises ApiError, with status GONE if the version is too old."""
        query = {
            **collection.query,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        async with (
            self._opened(collection.path, query, WATCH_S + ANSWER_S) as response,
            aclosing(_events(response)) as events,
        ):
            yield events

    @asynccontextmanager
    async def _opened(
        self, path: str, query: Mapping[str, str], silence_s: float
    ) -> AsyncIterator[Any]:
        """A response with status 200, of which nothing comes for at most `silence_s`."""
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S, read=silence_s, pool=None)
        try:
            async with self._http.stream(
                "GET", path, params=query, headers=self._headers(), timeout=timeout
            ) as response:
                if response.status_code != HTTPStatus.OK:
                    content = b"".join([part async for part in _bounded(response)])
                    raise _failure(response.status_code, content)
                yield response
        except httpx.TimeoutException:
            raise ApiError("it does not answer in time") from None
        except (httpx.HTTPError, OSError) as error:
            raise ApiError(str(error) or type(error).__name__) from None

    def _headers(self) -> dict[str, str]:
        if not self._token_file:
            return {}
        token = Path(self._token_file).read_bytes().strip()
        if not TOKEN.fullmatch(token):  # the client would refuse it with an error that shows it
            raise ApiError(f"{self._token_file} holds no token")
        return {"Authorization": f"Bearer {token.decode()}"}


def _certificates(ca_file: str) -> ssl.SSLContext | bool:
    try:
        return ssl.create_default_context(cafile=ca_file) if ca_file else True
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"{ca_file}: no certificates can be read: {error}") from None


async def _bounded(response: Any) -> AsyncIterator[bytes]:
    size = 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MAX_BYTES:
            raise ApiError(f"an answer is longer than {MAX_BYTES >> 20} MiB")
        yield part


async def _events(response: Any) -> AsyncGenerator[Event, None]:
    """The events of a watch: one JSON object a line."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MAX_BYTES:
            raise ApiError(f"an event is longer than {MAX_BYTES >> 20} MiB")
        for line in filter(None, lines):
            yield _event(line)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ApiError("its answer is no JSON object")
    return content


def _event(line: bytes) -> Event:
    """Raises ApiError for an event that reports an error."""
    content = _parse(line)
    kind, item = content.get("type"), content.get("object")
    if not (isinstance(kind, str) and isinstance(item, dict)):
        raise ApiError("its watch has a line that is no event")
    if kind == "ERROR":
        raise ApiError(_sentence(item) or "its watch ends with an error", _code(item))
    if not isinstance(item.get("metadata"), dict) or "resourceVersion" not in item["metadata"]:
        raise ApiError("its watch has an object without a version")
    return Event(kind, item)


def _failure(status: int, content: bytes) -> ApiError:
    """The error of an answer, which is a Status object or a proxy's page."""
    try:
        said = _sentence(_parse(content))
    except ApiError:
        said = ""
    return ApiError(said or f"it answers with status {status}", status)


def _sentence(status: Object) -> str:
    said = status.get("message")
    return said if isinstance(said, str) else ""


def _code(status: Object) -> int:
    code = status.get("code")
    return code if isinstance(code, int) else 0

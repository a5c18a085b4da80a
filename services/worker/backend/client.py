"""BackendClient: HTTP requests to one server, and what their failures mean."""

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import httpx2 as httpx

from services.runtime.network.wire import EventReader, WireError
from services.worker.backend.config import BackendConfig
from services.worker.backend.dialect import describe_error

MAX_PAGE_BYTES = 8 * 2**20  # of metrics or a list of models
IDLE_S = 2.0  # of a connection that is used again; servers close theirs after 5 s
LONGEST_RETRY_S = 30.0  # that a server may ask for
DIGITS = re.compile(r"[0-9]+")


class Refused(Exception):
    """The server will never answer this request; the message is its sentence."""


class Denied(Exception):
    """The server refuses the API key."""


class Busy(Exception):
    """The server has no capacity now. `retry_s`: for how long it asks to wait."""

    def __init__(self, message: str, retry_s: float = 0.0):
        super().__init__(message)
        self.retry_s = retry_s


class Lost(Exception):
    """The server cannot be reached, failed, or broke off."""


class Missing(Lost):
    """The server has no such page, or no longer serves this model."""


Failure = type[Refused] | type[Denied] | type[Busy] | type[Lost]

# Statuses that mean something else than their hundred does.
STATUSES: Mapping[int, Failure] = {
    401: Denied,
    403: Denied,
    404: Missing,
    408: Busy,
    409: Busy,
    425: Busy,
    429: Busy,
    503: Busy,
}
HUNDREDS: Mapping[int, Failure] = {4: Refused}


class BackendClient:
    """A pool of connections to one server."""

    def __init__(self, url: str, config: BackendConfig):
        self.url = url
        headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._short = httpx.Timeout(config.connect_s)
        patient = httpx.Timeout(config.connect_s, read=config.silence_s, pool=None)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=patient,
            # The scheduler bounds the requests; idle connections are kept for the next ones.
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def read_text(self, path: str) -> str:
        """The content of a page. Raises Refused, Denied, Busy or Lost."""
        async with self._opened("GET", path, timeout=self._short) as response:
            return (await _read(response)).decode(errors="replace")

    async def events(self, body: Mapping[str, Any]) -> AsyncGenerator[list[bytes], None]:
        """The events of an answer as they arrive, those of one chunk together. Closing the iterator
        ends the request. Raises Refused, Denied, Busy or Lost."""
        reader = EventReader()
        async with self._opened("POST", "/v1/completions", json=body) as response:
            async for data in response.aiter_bytes():
                if found := reader.feed(data):
                    yield found

    @asynccontextmanager
    async def _opened(self, method: str, path: str, **arguments: Any) -> AsyncIterator[Any]:
        """A response with status 200."""
        try:
            async with self._http.stream(method, path, **arguments) as response:
                if response.status_code != httpx.codes.OK:
                    raise await _failure(response, self.url)
                yield response
        except httpx.TimeoutException as error:
            kind = "connect" if isinstance(error, httpx.ConnectTimeout) else "answer"
            raise Lost(f"the backend {self.url} does not {kind} in time") from None
        except (httpx.HTTPError, WireError) as error:
            reason = str(error) or type(error).__name__
            raise Lost(f"the backend {self.url} cannot be reached: {reason}") from None


async def _read(response: Any) -> bytes:
    """The whole body. Raises Lost if it is too long."""
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > MAX_PAGE_BYTES:
            raise Lost(f"a page of the backend is longer than {MAX_PAGE_BYTES} bytes")
    return b"".join(parts)


async def _failure(response: Any, url: str) -> Exception:
    """What a status other than 200 means."""
    status = response.status_code
    kind = STATUSES.get(status) or HUNDREDS.get(status // 100, Lost)
    message = _sentence(await _read(response)) or f"the backend {url} answers with status {status}"
    if kind is not Busy:
        return kind(message)
    after = response.headers.get("retry-after", "")
    return Busy(message, min(LONGEST_RETRY_S, float(after)) if DIGITS.fullmatch(after) else 0.0)


def _sentence(content: bytes) -> str:
    """The server's own sentence; empty if there is none."""
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(message, dict):
        return ""
    error = message.get("error") or message.get("detail") or message.get("message")
    return describe_error(error) if error else ""

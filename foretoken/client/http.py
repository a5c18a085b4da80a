"""A conversation with any OpenAI-compatible server over HTTP, blocking: what `foretoken chat` asks
where it is given an `http://` address."""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, cast

from foretoken.client.address import SLA_HEADER, HttpAddress
from foretoken.client.answers import Chunk, Usage
from foretoken.client.errors import (
    DeadlineExceeded,
    ForetokenError,
    InvalidRequest,
    Overloaded,
    ServerError,
    Unauthenticated,
    Unavailable,
)
from services.core import FinishReason

CONNECT_S, SILENCE_S = 10.0, 300.0  # until it is reached; between two pieces of an answer
MOST_LINE_BYTES = 2**20
KINDS: Mapping[int, type[ForetokenError]] = {
    401: Unauthenticated,
    403: Unauthenticated,
    429: Overloaded,
    503: Unavailable,
    504: DeadlineExceeded,
}


class HttpStream:
    """An answer on its way, as `client.Stream`. Iterating raises a `ForetokenError`."""

    def __init__(self, server: "HttpServer", body: Mapping[str, Any], sla: str = ""):
        self.usage: Usage | None = None
        self._server, self._body, self._sla = server, body, sla
        self._open: tuple[http.client.HTTPConnection, http.client.HTTPResponse] | None = None
        self._cancelled = False

    def __iter__(self) -> Iterator[Chunk]:
        server, ended = self._server, False
        try:
            self._open = server.open("POST", "/v1/chat/completions", dict(self._body), self._sla)
            answer = self._open[1]
            while line := answer.readline(MOST_LINE_BYTES):
                said = line.strip()
                if said == b"data: [DONE]":
                    return
                if said.startswith(b"data:"):
                    for chunk in self._chunks(json.loads(said[5:])):
                        ended = ended or chunk.finish_reason is not None
                        yield chunk
            if not (ended or self._cancelled):
                raise Unavailable(f"the answer of {server.url} broke off")
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self._cancelled:
                raise Unavailable(f"the answer of {server.url} broke off: {error}") from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Hang up, which stops the answer there too. Nothing happens when it is over."""
        self._cancelled = True
        for each in self._open or ():
            each.close()

    def _chunks(self, told: dict[str, Any]) -> Iterator[Chunk]:
        if error := told.get("error"):
            raise ServerError(str(error.get("message") if isinstance(error, dict) else error))
        if usage := told.get("usage"):
            self.usage = Usage(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
        for choice in told.get("choices", ()):
            reason = choice.get("finish_reason")
            text = (choice.get("delta") or {}).get("content") or ""
            if text or reason:
                yield Chunk(choice.get("index", 0), text, (), (), reason_of(reason))


def reason_of(spelled: str | None) -> FinishReason | None:
    """Reasons that are OpenAI's or another's alone end an answer as any other."""
    if spelled is None:
        return None
    known = {reason.value: reason for reason in FinishReason}
    return known.get(spelled, FinishReason.STOP)


class HttpServer:
    """Where it is and with which key it is asked; a connection a request."""

    def __init__(self, url: str, api_key: str = ""):
        """Of `http://host:port`, with or without `/v1`. Raises ValueError."""
        self._address = address = HttpAddress.of(url)
        self.url = str(address)
        secure, plain = http.client.HTTPSConnection, http.client.HTTPConnection
        self._kind = secure if address.secure else plain
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def models(self) -> list[str]:
        """Names of the served models. Raises ForetokenError."""
        try:
            connection, answer = self.open("GET", "/v1/models")
            with closing(connection):
                return [str(card["id"]) for card in json.loads(answer.read())["data"]]
        except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
            raise Unavailable(f"{self.url} is no OpenAI-compatible server") from None

    def generate(
        self, messages: Sequence[Mapping[str, str]], model: str, sla: str, **sampling: Any
    ) -> HttpStream:
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return HttpStream(self, body | sampling, sla)

    def open(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, sla: str = ""
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A connection, to be closed, and the answer's beginning. Raises ForetokenError."""
        connection = self._kind(self._address.host, self._address.port, timeout=CONNECT_S)
        headers = self._headers | ({SLA_HEADER: sla} if sla else {})
        content = None
        if body is not None:
            headers, content = headers | {"Content-Type": "application/json"}, json.dumps(body)
        try:
            connection.connect()
            cast(socket.socket, connection.sock).settimeout(SILENCE_S)
            connection.request(method, self._address.base + path, content, headers)
            answer = connection.getresponse()
            if answer.status == 200:
                return connection, answer
            raise _refusal(answer, self.url)
        except ForetokenError:
            connection.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            why = getattr(error, "strerror", None) or error
            raise Unavailable(f"no server answers at {self.url}: {why}") from None


def _refusal(answer: http.client.HTTPResponse, url: str) -> ForetokenError:
    kind = KINDS.get(answer.status, InvalidRequest if answer.status < 500 else ServerError)
    raw = answer.read(MOST_LINE_BYTES).decode(errors="replace")
    try:
        message = str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{url} answers {answer.status}"
    waits = answer.headers.get("Retry-After", "")
    return kind(message, float(waits) if waits.isdigit() else 0.0)

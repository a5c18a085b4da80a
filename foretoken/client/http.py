"""A blocking chat client for any OpenAI-compatible server over HTTP; used by `foretoken chat`."""

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

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 300.0  # between two pieces of an answer
MAX_LINE_BYTES = 2**20
ERRORS: Mapping[int, type[ForetokenError]] = {
    401: Unauthenticated,
    403: Unauthenticated,
    429: Overloaded,
    503: Unavailable,
    504: DeadlineExceeded,
}


class HttpStream:
    """An answer that is being received, like `client.Stream`. Iterating raises ForetokenError."""

    def __init__(self, server: "HttpServer", body: Mapping[str, Any], sla: str = ""):
        self.usage: Usage | None = None
        self._server, self._body, self._sla = server, body, sla
        self._open: tuple[http.client.HTTPConnection, http.client.HTTPResponse] | None = None
        self._cancelled = False

    def __iter__(self) -> Iterator[Chunk]:
        server, finished = self._server, False
        try:
            self._open = server.open("POST", "/v1/chat/completions", dict(self._body), self._sla)
            answer = self._open[1]
            while line := answer.readline(MAX_LINE_BYTES):
                event = line.strip()
                if event == b"data: [DONE]":
                    return
                if event.startswith(b"data:"):
                    for chunk in self._decode(json.loads(event[5:])):
                        finished = finished or chunk.finish_reason is not None
                        yield chunk
            if not (finished or self._cancelled):
                raise Unavailable(f"{server.address} closed the connection before the answer ended")
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self._cancelled:
                raise Unavailable(f"the answer of {server.address} broke off: {error}") from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Closes the connection, which cancels the request. Does nothing once it has ended."""
        self._cancelled = True
        for each in self._open or ():
            each.close()

    def _decode(self, event: dict[str, Any]) -> Iterator[Chunk]:
        if error := event.get("error"):
            raise ServerError(str(error.get("message") if isinstance(error, dict) else error))
        if usage := event.get("usage"):
            self.usage = Usage(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
        for choice in event.get("choices", ()):
            reason = choice.get("finish_reason")
            text = (choice.get("delta") or {}).get("content") or ""
            if text or reason:
                yield Chunk(choice.get("index", 0), text, (), (), parse_finish_reason(reason))


def parse_finish_reason(text: str | None) -> FinishReason | None:
    """Returns the reason; an unknown reason of another server counts as STOP."""
    if text is None:
        return None
    known = {reason.value: reason for reason in FinishReason}
    return known.get(text, FinishReason.STOP)


class HttpServer:
    """One server and the API key it is asked with. Opens a connection per request."""

    def __init__(self, address: HttpAddress, api_key: str = ""):
        self.address = address
        secure, plain = http.client.HTTPSConnection, http.client.HTTPConnection
        self._connection = secure if address.secure else plain
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def models(self) -> list[str]:
        """Returns the names of the served models. Raises ForetokenError."""
        try:
            connection, answer = self.open("GET", "/v1/models")
            with closing(connection):
                return [str(card["id"]) for card in json.loads(answer.read())["data"]]
        except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
            raise Unavailable(f"{self.address} is not an OpenAI-compatible server") from None

    def generate(
        self, messages: Sequence[Mapping[str, str]], model: str, sla: str, **sampling: Any
    ) -> HttpStream:
        """Returns the stream of an answer; the request is sent when iteration begins."""
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
        """Sends a request; returns the connection, which the caller closes, and the response.

        Raises ForetokenError unless the status is 200.
        """
        connection = self._connection(
            self.address.host, self.address.port, timeout=CONNECT_TIMEOUT_S
        )
        headers = self._headers | ({SLA_HEADER: sla} if sla else {})
        content = None
        if body is not None:
            headers, content = headers | {"Content-Type": "application/json"}, json.dumps(body)
        try:
            connection.connect()
            cast(socket.socket, connection.sock).settimeout(READ_TIMEOUT_S)
            connection.request(method, self.address.base + path, content, headers)
            answer = connection.getresponse()
            if answer.status == 200:
                return connection, answer
            raise _decode_error(answer, self.address)
        except ForetokenError:
            connection.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            cause = getattr(error, "strerror", None) or error
            raise Unavailable(f"no server answers at {self.address}: {cause}") from None


def _decode_error(answer: http.client.HTTPResponse, address: HttpAddress) -> ForetokenError:
    kind = ERRORS.get(answer.status, InvalidRequest if answer.status < 500 else ServerError)
    raw = answer.read(MAX_LINE_BYTES).decode(errors="replace")
    try:
        message = str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{address} answers with HTTP status {answer.status}"
    retry_after = answer.headers.get("Retry-After", "")
    return kind(message, float(retry_after) if retry_after.isdigit() else 0.0)

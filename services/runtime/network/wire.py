"""Incremental parsers for HTTP/1.1 responses and server-sent events. No I/O.

For clients that must leave the cores to what they measure or scrape: no byte is copied twice, and
features that they do not need (trailers, folded headers, compression) are left out.
"""

from collections.abc import Callable

MAX_HEAD_BYTES = 65_536
MAX_EVENT_BYTES = 16 * 2**20
SIZE, DATA, AFTER = range(3)  # position within a chunked body


class WireError(ValueError):
    """The received bytes are not an HTTP response."""


class AnswerReader:
    """Parses one response: `feed` takes received bytes, `sink` gets the pieces of the body.

    `status` is 0 until the head is complete. `done` is set once the body is complete; `reusable`
    says whether the connection may carry another request. Raises WireError.
    """

    def __init__(self, sink: Callable[[bytes], None]):
        self.status = 0
        self.headers: dict[str, str] = {}  # lower-case names; the last of duplicates
        self.done = False
        self._sink = sink
        self._buffer = b""
        self._left: int | None = None  # bytes of the body or chunk; None: until close
        self._chunked = False
        self._state = SIZE

    @property
    def reusable(self) -> bool:
        return self.done and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> None:
        """Parses the next bytes. O(bytes); bytes after the response are dropped."""
        if self.done:
            return
        if not self.status:
            self._buffer += data
            data = self._read_head()
            if not self.status:
                return
        if self._chunked:
            self._feed_chunks(data)
        else:
            self._feed_plain(data)

    def end(self) -> None:
        """The connection closed, which ends a body of unknown length."""
        if self.status and not self._chunked and self._left is None:
            self.done = True

    def _read_head(self) -> bytes:
        """Returns the bytes after the head and sets `status` once the head is complete."""
        while True:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                if len(head) > MAX_HEAD_BYTES or head[:7] != b"HTTP/1."[: len(head)]:
                    raise WireError("the server does not speak HTTP/1.1")
                return b""
            first, *lines = head.decode("latin-1").split("\r\n")
            status = _parse_status(first)
            self._buffer = rest
            if status >= 200:
                break
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self.status, self._buffer = status, b""
        self._chunked = self.headers.get("transfer-encoding", "").lower().endswith("chunked")
        if not self._chunked:
            length = self.headers.get("content-length", "")
            self._left = int(length) if length.isdigit() else None
            self.done = self._left == 0 or status in (204, 304)
        return rest

    def _feed_plain(self, data: bytes) -> None:
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
            self.done = self.done or self._left == 0
        if data:
            self._sink(data)

    def _feed_chunks(self, data: bytes) -> None:
        """Parses chunks: a size line, the bytes and an empty line, until a size of 0."""
        buffer = self._buffer + data if self._buffer else data
        at = 0
        while at < len(buffer) and not self.done:
            if self._state == DATA and self._left:
                piece = buffer[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                self._sink(piece)
                self._state = DATA if self._left else AFTER
                continue
            end = buffer.find(b"\r\n", at)
            if end < 0:
                if len(buffer) - at > MAX_HEAD_BYTES:
                    raise WireError("a chunk of the response has no valid size")
                break
            line, at = buffer[at:end], end + 2
            if self._state == AFTER:
                self._state = SIZE
            elif self._left == 0 and self._state == DATA:  # trailers, until an empty line
                self.done = not line
            else:
                self._left, self._state = _parse_size(line), DATA
        self._buffer = buffer[at:] if at < len(buffer) else b""


class EventReader:
    """Parses server-sent events. Raises WireError for an event of over `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of each complete event; its `data` lines are joined by line feeds."""
        text = self._rest + data if self._rest else data
        if b"\r" in text:
            held = b"\r" if text.endswith(b"\r") else b""  # the line feed may follow
            text = text[: len(text) - len(held)].replace(b"\r\n", b"\n") + held
        *events, self._rest = text.split(b"\n\n")
        if len(self._rest) > self._max_bytes:
            raise WireError("an event of the stream is too long")
        return [found for event in events if (found := _parse_data(event)) is not None]


def _parse_data(event: bytes) -> bytes | None:
    if event.startswith(b"data:") and b"\n" not in event:  # the usual case
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def _parse_status(line: str) -> int:
    words = line.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise WireError("the server does not speak HTTP/1.1")
    return int(words[1])


def _parse_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise WireError("a chunk of the response has no valid size") from None

"""HTTP/1.1 answers and server-sent events, read from bytes as they come. No I/O here.

A client that measures must not take the cores it measures: nothing is copied twice, and what a
benchmark has no use for (trailers, folded headers, compression) is not there.
"""

from collections.abc import Callable

MOST_HEAD_BYTES = 65_536
MOST_EVENT_BYTES = 16 * 2**20
SIZE, DATA, AFTER = range(3)  # where within a chunked body


class WireError(ValueError):
    """What came is no HTTP answer."""


class AnswerReader:
    """One answer: `feed` what was received, and `sink` gets the body's pieces.

    `status` is 0 until the head is there; `done` says the body is whole, and `reusable` that the
    connection may carry another request then. Raises WireError.
    """

    def __init__(self, sink: Callable[[bytes], None]):
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case; of two alike the last
        self.done = False
        self._sink = sink
        self._buffer = b""
        self._left: int | None = None  # of a body of known length, or of a chunk; None: to the end
        self._chunked = False
        self._state = SIZE

    @property
    def reusable(self) -> bool:
        return self.done and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> None:
        """O(bytes); what comes after the answer is dropped."""
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
        """The connection was closed: the end of a body that has no other."""
        if self.status and not self._chunked and self._left is None:
            self.done = True

    def _read_head(self) -> bytes:
        """What of the buffer is behind the head; sets `status` once that is whole."""
        while True:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                if len(head) > MOST_HEAD_BYTES or head[:7] != b"HTTP/1."[: len(head)]:
                    raise WireError("what answers does not speak HTTP/1.1")
                return b""
            first, *lines = head.decode("latin-1").split("\r\n")
            status = _status_of(first)
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
        """Size line, so many bytes and an empty line, again and again until a size of 0."""
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
                if len(buffer) - at > MOST_HEAD_BYTES:
                    raise WireError("a chunk of the answer has no size")
                break
            line, at = buffer[at:end], end + 2
            if self._state == AFTER:
                self._state = SIZE
            elif self._left == 0 and self._state == DATA:  # trailers, until an empty line
                self.done = not line
            else:
                self._left, self._state = _size_of(line), DATA
        self._buffer = buffer[at:] if at < len(buffer) else b""


class EventReader:
    """The `data` of server-sent events, `feed` by `feed`. Raises WireError for one too long."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """What events have become whole; several `data` lines of one are joined by line feeds."""
        text = self._rest + data if self._rest else data
        if b"\r" in text:
            held = b"\r" if text.endswith(b"\r") else b""  # its line feed may be on its way
            text = text[: len(text) - len(held)].replace(b"\r\n", b"\n") + held
        *events, self._rest = text.split(b"\n\n")
        if len(self._rest) > MOST_EVENT_BYTES:
            raise WireError("an event of the answer has no end")
        return [found for event in events if (found := _data_of(event)) is not None]


def _data_of(event: bytes) -> bytes | None:
    if event.startswith(b"data:") and b"\n" not in event:  # nearly all
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def _status_of(line: str) -> int:
    words = line.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise WireError("what answers does not speak HTTP/1.1")
    return int(words[1])


def _size_of(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise WireError("a chunk of the answer has no size") from None

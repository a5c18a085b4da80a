"""An incremental parser for server-sent events. No I/O: no byte is copied twice."""

MAX_EVENT_BYTES = 16 * 2**20


class WireError(ValueError):
    """The received bytes are not what the protocol says."""


class EventReader:
    """Parses server-sent events. Raises WireError for an event that is too long."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of each complete event; its `data` lines are joined by line feeds."""
        text = self._rest + data if self._rest else data
        if b"\r" in text:
            held = b"\r" if text.endswith(b"\r") else b""  # the line feed may follow
            text = text[: len(text) - len(held)].replace(b"\r\n", b"\n") + held
        *events, self._rest = text.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise WireError("an event of the stream is too long")
        return [found for event in events if (found := _parse_data(event)) is not None]


def _parse_data(event: bytes) -> bytes | None:
    if event.startswith(b"data:") and b"\n" not in event:  # the usual case
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None

"""A proxy that records requests: `recording(url)` runs it in front of a server.

Bytes are forwarded both ways unchanged, and requests are parsed beside. It writes `sent/*.json`:
bodies of real clients, which the fast tests send again.
"""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

READ_BYTES = 65536
HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True)
class Sent:
    """One request: its method, its path and, where it has one, its JSON body."""

    method: str
    path: str
    body: object = None

    @property
    def shape(self) -> str:
        """A text that is equal for requests that differ in values only."""
        return f"{self.method} {self.path} {json.dumps(_fields(self.body))}"


def _fields(body: object) -> object:
    """The names of a body's fields, nested."""
    if isinstance(body, dict):
        return {name: _fields(body[name]) for name in sorted(body)}
    if isinstance(body, list):
        return _fields(body[0]) if body else []
    return type(body).__name__


@dataclass
class Requests:
    """Parses the requests of a connection. Bodies must have a Content-Length."""

    kept: list[Sent]
    unread: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def feed(self, received: bytes) -> None:
        """Record each request that is complete."""
        self.unread += received
        while HEAD_END in self.unread:
            head, rest = self.unread.split(HEAD_END, 1)
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
            length = int(headers.get("content-length", 0))
            if len(rest) < length:
                return
            body, self.unread = rest[:length], rest[length:]
            method, path, _ = first.split(" ", 2)
            with self.lock:
                self.kept.append(Sent(method, path, json.loads(body) if body else None))


@dataclass(frozen=True)
class Recording:
    """Where to send to, and what was."""

    url: str
    kept: list[Sent]

    def save(self, file: Path) -> None:
        """One request of each shape, in the order they came first, beside those in the file."""
        before = load(file) if file.exists() else []
        shapes = {each.shape: each for each in reversed([*before, *self.kept])}
        chosen = sorted(shapes.values(), key=lambda each: [*before, *self.kept].index(each))
        rows = [{k: v for k, v in vars(each).items() if v is not None} for each in chosen]
        file.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def load(file: Path) -> list[Sent]:
    """The requests that a recording saved."""
    return [Sent(**row) for row in json.loads(file.read_text())]


@contextmanager
def recording(url: str) -> Iterator[Recording]:
    """A recording of all that is sent to the server at `url` through another address."""
    parts = urlsplit(url)
    server = (parts.hostname or "127.0.0.1", parts.port or 80)
    kept: list[Sent] = []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def accept() -> None:
            with suppress(OSError):  # the door is closed
                while True:
                    client, _ = door.accept()
                    through = socket.create_connection(server)
                    heard = Requests(kept)
                    _start(client, through, heard)
                    _start(through, client, None)

        threading.Thread(target=accept, daemon=True).start()
        yield Recording(f"http://127.0.0.1:{door.getsockname()[1]}", kept)
        door.shutdown(socket.SHUT_RDWR)


def _start(source: socket.socket, to: socket.socket, heard: Requests | None) -> None:
    threading.Thread(target=_pump, args=(source, to, heard), daemon=True).start()


def _pump(source: socket.socket, to: socket.socket, heard: Requests | None) -> None:
    """Hand on one direction until it ends."""
    with suppress(OSError):
        while received := source.recv(READ_BYTES):
            if heard is not None:
                heard.feed(received)
            to.sendall(received)
    with suppress(OSError):
        to.shutdown(socket.SHUT_WR)

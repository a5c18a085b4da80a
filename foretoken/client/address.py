"""Server addresses: how a client parses them, and how it detects the protocol of a bare one."""

import socket
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlsplit

DEFAULT_SERVER = "127.0.0.1:50051"
API_KEY_VARIABLE = "FORETOKEN_API_KEY"
SLA_HEADER = "x-foretoken-sla"
EXAMPLES = "http://127.0.0.1:8000, grpc://127.0.0.1:50051 or 127.0.0.1:8000"
DETECT_S = 3.0


@dataclass(frozen=True)
class HttpAddress:
    """An OpenAI-compatible server. `base` is the path before `/v1`."""

    host: str
    port: int
    base: str = ""
    secure: bool = False

    @classmethod
    def parse(cls, url: str) -> "HttpAddress":
        """Parses `http://host:port`, with or without `/v1` or the scheme. Raises ValueError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ValueError(f"{url!r} is not a server address; examples: {EXAMPLES}")
        secure = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), base, secure)

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"http{'s' if self.secure else ''}://{self.authority}{self.base}"


@dataclass(frozen=True)
class GrpcAddress:
    """A gRPC server: `host:port` or `unix:/path`."""

    target: str

    def __str__(self) -> str:
        return self.target if self.target.startswith("unix:") else f"grpc://{self.target}"


ServerAddress = HttpAddress | GrpcAddress


def resolve_server(text: str, prefer_http: bool = False) -> ServerAddress:
    """Parses what `--server` takes: `http://…`, `grpc://host:port`, `unix:/path` or `host:port`.

    A bare `host:port` is asked for its protocol; one that cannot be reached counts as gRPC, or as
    HTTP with `prefer_http`, and the client then reports the failure. Raises ValueError.
    """
    if text.startswith(("http://", "https://")):
        return HttpAddress.parse(text)
    if text.startswith("unix:"):
        return GrpcAddress(text)
    target = text.removeprefix("grpc://")
    if "://" in target:
        raise ValueError(f"{text!r} is not a server address; examples: {EXAMPLES}")
    address = HttpAddress.parse(target)
    if target == text and _speaks_http(address, prefer_http):
        return address
    return GrpcAddress(address.authority)


def parse_grpc_target(text: str) -> str:
    """Returns the gRPC target of `host:port`, `grpc://host:port` or `unix:/path`.

    Raises ValueError for another scheme.
    """
    target = text.removeprefix("grpc://")
    if "://" in target:
        raise ValueError(
            f"{text!r} is not a gRPC address; pass the host:port that the ready line names"
        )
    return target


def _speaks_http(address: HttpAddress, if_unreachable: bool) -> bool:
    """Whether an HTTP/1.1 request is answered as such. gRPC answers with an HTTP/2 frame."""
    request = f"GET /v1/models HTTP/1.1\r\nHost: {address.authority}\r\nConnection: close\r\n\r\n"
    try:
        peer = socket.create_connection((address.host, address.port), DETECT_S)
    except OSError:
        return if_unreachable
    try:
        with closing(peer):
            peer.sendall(request.encode())
            return peer.recv(7, socket.MSG_WAITALL) == b"HTTP/1."
    except OSError:
        return False

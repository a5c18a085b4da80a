"""Where a client looks for a server and for its key, if it isn't told; what an address says."""

from dataclasses import dataclass
from urllib.parse import urlsplit

DEFAULT_ADDRESS = "127.0.0.1:50051"
API_KEY_VARIABLE = "FORETOKEN_API_KEY"
SLA_HEADER = "x-foretoken-sla"


@dataclass(frozen=True)
class HttpAddress:
    """Where an OpenAI-compatible server is. `base` is the path before `/v1`."""

    host: str
    port: int
    base: str = ""
    secure: bool = False

    @classmethod
    def of(cls, url: str) -> "HttpAddress":
        """Of `http://host:port`, with or without `/v1` or the scheme. Raises ValueError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ValueError(f"{url!r} is no address of a server, like http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), base, secure)

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"http{'s' if self.secure else ''}://{self.authority}{self.base}"

"""Settings of a worker in front of an OpenAI-compatible server."""

from typing import ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from services.runtime.config import ConfigError, Settings
from services.worker.config import WorkerConfig, find_unused

MAX_BACKENDS = 64
# Keys of an engine that a backend's worker has, too. `swap_dtype` is set for some presets; nothing
# is swapped here.
USED = frozenset(
    {
        "model",
        "local_rank",
        "local_workers",
        "kv_tokens",
        "block_tokens",
        "max_running",
        "max_context_tokens",
        "swap_dtype",
    }
)


class BackendConfig(Settings):
    """Section `backend`: OpenAI-compatible servers of one model, one for each worker.

    `foretoken serve --engine openai --backend URL` sets `urls`. Memory and limits of a server that
    does not tell them are those of section `worker`.
    """

    section: ClassVar[str] = "backend"
    secret: ClassVar[frozenset[str]] = frozenset({"api_key"})

    # A worker's server is the one at its `worker.local_rank`; with or without /v1.
    urls: tuple[str, ...] = Field(default=(), max_length=MAX_BACKENDS)
    api_key: str = ""  # sent as a bearer token
    model: str = ""  # its name at the servers; empty: the only one, or worker.model_name
    poll_s: float = Field(default=0.5, gt=0, le=60)  # between two readings of health and metrics
    connect_s: float = Field(default=5.0, gt=0)  # to connect, and to answer a reading
    # Longest silence within an answer. A server sends nothing while a request waits in its queue.
    silence_s: float = Field(default=120.0, gt=0)
    # Attempts of one request without a new token, after which it fails. Pauses between attempts
    # double up to `longest_pause_s`.
    attempts: int = Field(default=16, ge=1, le=1_000)
    longest_pause_s: float = Field(default=2.0, gt=0)

    @field_validator("urls")
    @classmethod
    def _normalised(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(normalise_url, urls))


def normalise_url(url: str) -> str:
    """The address of a server without a path's `/v1`. Raises ValueError with a sentence."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port_known = parts.port is None or 0 < parts.port < 65_536
    except ValueError:
        port_known = False
    known = parts.scheme in ("http", "https") and parts.hostname and port_known
    if not known or any(letter.isspace() for letter in url):
        raise ValueError(
            f"{url!r} is not the address of a server; give http://HOST:PORT or https://HOST"
        )
    if parts.username or parts.query or parts.fragment:
        raise ValueError(
            f"{url.split('@')[-1]!r} must be a plain address; a key is given by --backend-key"
        )
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def check_settings(config: WorkerConfig, backend: BackendConfig) -> None:
    """Raises ConfigError for a worker without a server, and for settings of an engine that computes
    in this process."""
    if config.local_rank >= len(backend.urls):
        raise ConfigError(
            f"backend.urls: worker {config.local_rank} has no server; name one for each worker "
            f"(got {len(backend.urls)})"
        )
    for key in find_unused(config, USED):
        raise ConfigError(
            f"worker.{key} has no effect with --engine openai, where another server "
            "computes: leave it out, and set it there"
        )

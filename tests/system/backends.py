"""Fleets of servers behind a `foretoken serve --engine openai`, for tests.

The servers are emulated: they start fast, their steps take a known time, and equal prompts have
equal answers on all of them, wherever a request continues.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.live import Live, serving

HARDWARE = """
about = "steps of 10 ms"
[cost]
base_s = 0.01
prefill_token_s = 1e-6
decode_seq_s = 1e-5
context_token_s = 1e-8
offload_token_s = 1e-7
upload_token_s = 1e-7
[memory]
kv_tokens = 20_000
host_tokens = 0
[engine]
max_batch_tokens = 256
"""
KEY = "key-of-the-backends"
ONE_PROCESS = ("--gateways", "0", "--no-ui")
NO_DRAIN = ("--set", "gateway.drain_s=0", "--set", "worker.drain_s=0")


@dataclass(frozen=True)
class Fleet:
    """`front` serves the requests of its clients by `servers`. `log` is the front's stderr."""

    front: Live
    servers: tuple[Live, ...]
    log: Path


@contextmanager
def emulated(folder: Path, *arguments: str, tokens: int = 60) -> Iterator[Live]:
    """A server with answers of this many tokens."""
    hardware = folder / "steps.toml"
    hardware.write_text(HARDWARE)
    lengths = (f"emulation.median_tokens={tokens}", "emulation.sigma=0")
    sets = [part for text in lengths for part in ("--set", text)]
    options = ("--emulate", str(hardware), *sets, "--api-key", KEY, *ONE_PROCESS, *NO_DRAIN)
    with serving(*options, *arguments) as live:
        yield live


@contextmanager
def fronting(folder: Path, urls: list[str], *arguments: str) -> Iterator[tuple[Live, Path]]:
    """A front of these servers, and the file that holds its stderr."""
    backends = [part for url in urls for part in ("--backend", url)]
    log = folder / "front.log"
    options = ("--engine", "openai", *backends, "--backend-key", KEY, *ONE_PROCESS, *NO_DRAIN)
    with serving(*options, *arguments, stderr=log) as live:
        yield live, log


@contextmanager
def fleet(
    folder: Path, servers: int, *arguments: str, server: tuple[str, ...] = (), tokens: int = 60
) -> Iterator[Fleet]:
    """Servers with the arguments `server`, and a front of them with `arguments`."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(emulated(folder, *server, tokens=tokens)) for _ in range(servers)
        ]
        urls = [live.http for live in started]
        front, log = stack.enter_context(fronting(folder, urls, *arguments))
        yield Fleet(front, tuple(started), log)


def complete(live: Live, prompt: str, key: str = "", **fields: Any) -> dict[str, Any]:
    """The only choice of a completion."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 100, "temperature": 0, **fields}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = Request(f"{live.http}/v1/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=120) as answer:
        choice: dict[str, Any] = json.loads(answer.read())["choices"][0]
    return choice


def kill(live: Live) -> None:
    """Ends a server without any notice. Its gateway is in the process that is killed; the other
    processes end with it."""
    live.process.kill()
    live.process.wait(30)

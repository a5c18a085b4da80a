"""A real `foretoken serve` process, for tests of the whole system."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO

ROOT = Path(__file__).parents[1]
READY = re.compile(r"foretoken is ready: .* HTTP (http://\S+), gRPC (\S+)")
STARTED_S = 120.0
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
# Which services share a process, and the options that say so.
MODES = {
    "embedded": ["--gateways", "0"],
    "gateways": ["--gateways", "2"],
    "separate": ["--separate"],
}


class NotStarted(AssertionError):
    """`foretoken serve` ended, or was not ready in time. The message holds its stderr."""


@dataclass(frozen=True)
class Live:
    """A running system and its addresses."""

    process: subprocess.Popen[str]
    http: str
    grpc: str

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def command(*arguments: str, python: Path | str = sys.executable) -> list[str]:
    return [str(python), "-m", "foretoken", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@contextmanager
def serving(
    *arguments: str,
    stderr: Path | None = None,
    python: Path | str = sys.executable,
    started_s: float = STARTED_S,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> Iterator[Live]:
    """`foretoken serve` on free ports, ready during the block. Its stderr goes to a file, and into
    the error if it does not start within `started_s`. `python`: another environment's. `variables`
    are added to the environment."""
    ports = ["--http-port", "0", "--grpc-port", "0"]
    with stderr.open("w+") if stderr else TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command("serve", *ports, *arguments, python=python),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment() | dict(variables),
            cwd=ROOT,
        )
        try:
            yield _ready(process, errors, started_s)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _ready(process: subprocess.Popen[str], errors: IO[str], limit_s: float) -> Live:
    assert process.stdout is not None
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        found = READY.search(line := process.stdout.readline())
        if found:
            return Live(process, *found.groups())
        if not line:
            break
    errors.seek(0)
    raise NotStarted(f"foretoken serve did not start: {errors.read().rstrip()}")


def counted(url: str, name: str) -> float:
    """A counter of the process behind `url`, summed over its labels."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    family = f"foretoken_{name}_total"
    found = [x for x in text.splitlines() if x.startswith((f"{family} ", f"{family}{{"))]
    assert found, f"{url} has no metric {family}"
    return sum(float(line.split()[-1]) for line in found)


def wait_for(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Polls until `condition()` is true; fails after the limit."""
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, f"{condition} is not true after {limit_s} s"
        time.sleep(0.02)

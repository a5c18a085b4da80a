"""Processes of the measured systems (foretoken and vLLM on the CPU) and their metrics."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO, Any

from foretoken.running.options import demo_model
from foretoken.running.ports import free_port

NONE: Mapping[str, str] = MappingProxyType({})
READY_MARK = "foretoken is ready"
VLLM_BLOCK_TOKENS = 32  # the smallest block of its CPU kernels
VLLM_START_S = 300.0  # half a minute on two idle cores, two minutes beside other work
GIB = 2**30
END_S = 60.0  # twice the longest drain
METRIC = re.compile(r"^(foretoken_|vllm:)(\w+)(?:{[^}]*})? ([\d.e+-]+)$", re.MULTILINE)


@dataclass(frozen=True)
class System:
    """A running server. `pid` is its first process; `grpc` may be empty."""

    http: str
    grpc: str
    pid: int


@contextmanager
def foretoken_system(*arguments: str, checkout: str = "", python: str = "") -> Iterator[System]:
    """Runs `foretoken serve` on free ports, of another checkout of the project, or with another
    Python, if one is given."""
    command = [python or sys.executable, "-m", "foretoken", "serve", *arguments]
    ports = ["--http-port", "0", "--grpc-port", "0"]
    folder = checkout or None  # Python imports from the current folder first
    with running([*command, *ports], stdout=subprocess.PIPE, cwd=folder) as process:
        assert process.stdout is not None
        line = next((x for x in process.stdout if READY_MARK in x), "")
        if not line:
            raise RuntimeError("foretoken serve did not start")
        http, grpc = line.split(" HTTP ")[1].split(", gRPC ")
        yield System(http.strip(), grpc.strip(), process.pid)


def settings(*choices: str) -> list[str]:
    """Returns `--set` arguments of `foretoken serve`."""
    return [word for choice in choices for word in ("--set", choice)]


@contextmanager
def vllm_server(
    python: str,
    kv_tokens: int,
    model: str = "",
    dtype: str = "float32",
    max_tokens: int = 0,
    kv_bytes: int = GIB,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] = NONE,
) -> Iterator[System]:
    """Runs vLLM's server with `python`.

    model: a folder; the demo model if empty. kv_bytes: size of `kv_tokens`, rounded up to GiB.
    max_tokens: length of the longest sequence, 0 for the model's limit. variables: added to its
    environment.
    """
    port = free_port()
    model = model or demo_model()
    max_length = ["--max-model-len", str(max_tokens)] if max_tokens else []
    # fmt: off
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", model, "--served-model-name", Path(model).name, "--dtype", dtype, *max_length,
        "--block-size", str(VLLM_BLOCK_TOKENS),
        "--num-gpu-blocks-override", str(kv_tokens // VLLM_BLOCK_TOKENS),
        "--host", "127.0.0.1", "--port", str(port), *arguments,
    ]
    # fmt: on
    with (
        TemporaryFile("w+") as output,
        vllm_process(
            command, kv_bytes, variables, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + VLLM_START_S
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                output.seek(0)
                raise RuntimeError(f"vLLM did not start: {output.read()[-2_000:]}")
            time.sleep(0.5)
        yield System(url, "", process.pid)


@contextmanager
def vllm_process(
    command: list[str], kv_bytes: int, variables: Mapping[str, str] = NONE, **pipes: IO[str] | int
) -> Iterator["subprocess.Popen[str]"]:
    """Runs a command of vLLM's Python, without this project's path."""
    space = str(ceil(kv_bytes / GIB))
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": space, **variables}
    environment.pop("PYTHONPATH", None)
    with running(command, env=environment, **pipes) as process:
        yield process


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, without its child processes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_metrics(url: str) -> dict[str, float]:
    """Returns the metrics without their prefix, summed over labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return sum_metrics(answer.read().decode())


def sum_metrics(text: str) -> dict[str, float]:
    """The same of a page's text. foretoken repeats some of its metrics by vLLM's names: they count
    once."""
    totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for prefix, name, value in METRIC.findall(text):
        totals[prefix][name] += float(value)
    return {**totals["vllm:"], **totals["foretoken_"]}


@contextmanager
def running(command: list[str], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Runs a command; stops it and its child processes at the end of the block."""
    with subprocess.Popen(command, text=True, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _is_healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return int(answer.status) == 200
    return False

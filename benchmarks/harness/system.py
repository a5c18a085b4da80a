"""The whole system as users run it, vLLM on the CPU as a peer, and the metrics of both."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from foretoken.running.options import demo_model
from foretoken.running.ports import free_port

READY_MARK = "foretoken is ready"
VLLM_BLOCK_TOKENS = 32  # the smallest its CPU kernels take
VLLM_START_S = 300.0  # on two cores it takes half a minute, beside other work two
END_S = 60.0  # twice what a drain takes at most
METRIC = re.compile(r"^(?:foretoken_|vllm:)(\w+)(?:{[^}]*})? ([\d.e+-]+)$", re.MULTILINE)


@contextmanager
def system(*arguments: str) -> Iterator[tuple[str, str]]:
    """`foretoken serve` on free ports, with further arguments; yields its HTTP and gRPC."""
    command = [sys.executable, "-m", "foretoken", "serve", *arguments]
    ports = ["--http-port", "0", "--grpc-port", "0"]
    with running([*command, *ports], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = next((x for x in process.stdout if READY_MARK in x), "")
        if not line:
            raise RuntimeError("foretoken serve did not start")
        http, grpc = line.split(" HTTP ")[1].split(", gRPC ")
        yield http.strip(), grpc.strip()


@contextmanager
def vllm(
    python: str,
    kv_tokens: int,
    model: str = "",
    dtype: str = "float32",
    length_tokens: int = 0,
    kv_gib: int = 1,
) -> Iterator[str]:
    """vLLM's server under that Python, with the demo model (or another folder's) and so much KV,
    of at most `kv_gib`; yields its HTTP. `length_tokens`: the longest sequence, 0: the model's."""
    port = free_port()
    model = model or demo_model()
    longest = ["--max-model-len", str(length_tokens)] if length_tokens else []
    # fmt: off
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", model, "--served-model-name", Path(model).name, "--dtype", dtype, *longest,
        "--block-size", str(VLLM_BLOCK_TOKENS),
        "--num-gpu-blocks-override", str(kv_tokens // VLLM_BLOCK_TOKENS),
        "--host", "127.0.0.1", "--port", str(port),
    ]
    # fmt: on
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": str(kv_gib)}
    environment.pop("PYTHONPATH", None)
    with TemporaryFile("w+") as said:
        to = {"stdout": said, "stderr": subprocess.STDOUT, "env": environment}
        with running(command, **to) as process:
            url = f"http://127.0.0.1:{port}"
            until_s = time.monotonic() + VLLM_START_S
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() > until_s:
                    said.seek(0)
                    raise RuntimeError(f"vLLM did not start: {said.read()[-2_000:]}")
                time.sleep(0.5)
            yield url


def counted(url: str) -> dict[str, float]:
    """Its metrics without their prefix, summed over labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for name, value in METRIC.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Ends its processes at the end of the block."""
    with subprocess.Popen(command, text=True, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return int(answer.status) == 200
    return False

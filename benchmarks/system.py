"""The whole system, as users run it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

READY_MARK = "foretoken is ready"


@contextmanager
def system(*arguments: str) -> Iterator[tuple[str, str]]:
    """`foretoken serve` on free ports, with further arguments; yields its HTTP and gRPC."""
    command = [sys.executable, "-m", "foretoken", "serve", *arguments]
    ports = ["--http-port", "0", "--grpc-port", "0"]
    with subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((x for x in process.stdout if READY_MARK in x), "")
            if not line:
                raise RuntimeError("foretoken serve did not start")
            http, grpc = line.split(" HTTP ")[1].split(", gRPC ")
            yield http.strip(), grpc.strip()
        finally:
            process.terminate()

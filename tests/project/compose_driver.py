"""Runs the services of deploy/compose.yaml without a container engine: with their commands and
environments, host names from a hosts file, in a separate network and mount namespace.

tests/project/test_compose.py starts it under `unshare`. Prints the results as one JSON line.
"""

import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
STARTED_S = 120.0
VARIABLE = re.compile(r"\$\{(\w+)-([^}]*)\}")


def loopback_up() -> None:
    flags = struct.pack("16sh14s", b"lo", 1 | 64, b"\0" * 14)  # IFF_UP | IFF_RUNNING
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, flags)  # SIOCSIFFLAGS


def name_hosts(names: list[str], folder: Path) -> None:
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost " + " ".join(names) + "\n")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)


def filled_in(value: object) -> str:
    """Replaces `${NAME-default}` like compose: by the default if NAME is not set."""
    return VARIABLE.sub(lambda found: os.environ.get(found[1], found[2]), str(value))


def own_services(composed: dict[str, Any]) -> dict[str, Any]:
    """The services of foretoken without a profile."""
    return {
        name: service
        for name, service in composed["services"].items()
        if service["image"].startswith("foretoken:") and "profiles" not in service
    }


def placed(text: str, folder: Path) -> str:
    """A word of a command or a setting, with the volume of certificates in `folder`."""
    return text.replace("/certs", f"{folder}/certs")


def environment(service: dict[str, Any], folder: Path) -> dict[str, str]:
    """The environment of a service, and a PATH with its `python`."""
    given = service.get("environment", {})
    own = {key: placed(filled_in(value), folder) for key, value in given.items()}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": "1"} | own


def wait_healthy(
    name: str, service: dict[str, Any], process: subprocess.Popen[bytes], folder: Path
) -> None:
    """Repeats the service's health check until it passes."""
    kind, *command = service["healthcheck"]["test"]
    assert kind == "CMD"
    until = time.monotonic() + STARTED_S
    while subprocess.run(command, env=environment(service, folder), capture_output=True).returncode:
        if process.poll() is not None or time.monotonic() > until:
            sys.exit(f"{name} did not become healthy (exit status {process.poll()})")


def answer() -> dict[str, Any]:
    """A chat completion from the gateway, after it is healthy."""
    until = time.monotonic() + STARTED_S
    while time.monotonic() < until:
        try:
            urllib.request.urlopen("http://gateway:8000/health", timeout=5)
            break
        except OSError:
            time.sleep(0.2)
    message = {"role": "user", "content": sys.argv[1]}
    body = json.dumps({"model": "demo", "messages": [message], "temperature": 0}).encode()
    request = urllib.request.Request(
        "http://gateway:8000/v1/chat/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        got: dict[str, Any] = json.load(response)
        return got


def main() -> None:
    services = own_services(yaml.safe_load((ROOT / "deploy/compose.yaml").read_text()))
    loopback_up()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        name_hosts(list(services), folder)
        try:
            for name, service in services.items():
                for other, wanted in service.get("depends_on", {}).items():
                    assert other in processes, f"{name} depends on {other}, listed after it"
                    if wanted["condition"] == "service_completed_successfully":
                        assert processes[other].wait(STARTED_S) == 0
                command = [placed(word, folder) for word in service["command"]]
                own = environment(service, folder)
                processes[name] = subprocess.Popen(command, env=own, cwd=ROOT)
            for name, service in services.items():
                if "healthcheck" in service:
                    wait_healthy(name, service, processes[name], folder)
            result = answer()
        finally:
            for process in processes.values():
                process.terminate()
            statuses = {name: process.wait(60) for name, process in processes.items()}
    print(json.dumps({"answer": result, "exit_statuses": statuses}))


if __name__ == "__main__":
    main()

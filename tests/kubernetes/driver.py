"""Runs the pods of the overlay `one-node` without a cluster: their commands with their
environments, all at once, names of Services and pods from a hosts file, and a root that is
read-only but for /tmp.

tests/kubernetes/test_run.py starts it under `unshare`. Prints the results as one JSON line.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from services.runtime.healthcheck import check
from services.runtime.outcomelog.opening import STREAM
from tests.kubernetes.resolved import (
    ROOT,
    Object,
    container,
    environment,
    name,
    of_kind,
    path_with_python,
    pod,
    ports,
    workloads,
)
from tests.project.compose_driver import answer, loopback_up, name_hosts

OVERLAY = "one-node"
LEARNED_S = 30.0
Pods = dict[str, subprocess.Popen[bytes]]


def make_root_read_only() -> None:
    """Leaves /tmp, which is empty but for the repository if that lies there."""
    mount = ["mount", "--no-canonicalize"]
    subprocess.run([*mount, "-t", "tmpfs", "tmpfs", "/tmp"], check=True)
    if ROOT.is_relative_to("/tmp"):
        ROOT.mkdir(parents=True)
        subprocess.run([*mount, "--bind", "/proc/self/cwd", str(ROOT)], check=True)
        subprocess.run([*mount, "-o", "remount,bind,ro", str(ROOT)], check=True)
        os.chdir(ROOT)
    subprocess.run([*mount, "-o", "remount,bind,ro", "/"], check=True)


def hosts(items: Sequence[Object]) -> list[str]:
    """Names of the Services, and of the pods of headless ones."""
    names = [name(each) for each in of_kind(OVERLAY, "Service")]
    sets = [each for each in items if each["kind"] == "StatefulSet"]
    return [*names, *(f"{name(each)}-0.{each['spec']['serviceName']}" for each in sets)]


def started(workload: Object) -> subprocess.Popen[bytes]:
    """The first pod's container. Its volumes are folders below /tmp."""
    command = [str(part) for part in container(workload)["command"]]
    for mount in container(workload)["volumeMounts"]:
        path = Path("/tmp") / mount["mountPath"].removeprefix("/tmp").strip("/")
        path.mkdir(parents=True, exist_ok=True)
        if mount["mountPath"] != "/tmp":
            command = [str(path) if part == mount["mountPath"] else part for part in command]
    known = {"PATH": path_with_python(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=known | environment(OVERLAY, workload))


def passes(workload: Object, probe: Object) -> bool:
    if "grpc" in probe:
        return check(f"127.0.0.1:{probe['grpc']['port']}") == "SERVING"
    if "tcpSocket" in probe:
        with socket.socket() as client:
            port = ports(workload)[probe["tcpSocket"]["port"]]
            return client.connect_ex(("127.0.0.1", port)) == 0
    command = probe["exec"]["command"]
    return subprocess.run(command, capture_output=True).returncode == 0


def wait_started(workload: Object, process: subprocess.Popen[bytes]) -> None:
    """Waits for the startup probe, as long as it allows, then for the other two."""
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container(workload)[kind]
        until = time.monotonic() + probe["periodSeconds"] * probe["failureThreshold"]
        while not passes(workload, probe):
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"{name(workload)}: {kind} failed (exit status {process.poll()})")
            time.sleep(0.2)


def outcomes() -> int:
    """The number of outcomes in Redis, once there is one."""
    until = time.monotonic() + LEARNED_S
    while time.monotonic() < until:
        length = subprocess.run(["redis-cli", "xlen", STREAM], capture_output=True, check=True)
        if count := int(length.stdout):
            return count
        time.sleep(0.2)
    return 0


def metrics_ports_answer(items: Sequence[Object]) -> list[str]:
    """The workloads with a port `metrics` that serves Prometheus' format."""
    found = []
    for each in items:
        if "metrics" in ports(each):
            with socket.create_connection(("127.0.0.1", ports(each)["metrics"]), 10) as client:
                client.sendall(b"GET /metrics HTTP/1.1\r\nHost: any\r\n\r\n")
                with client.makefile("rb") as received:
                    text = received.read()
            if b"\n# HELP " in text:
                found.append(name(each))
    return found


def stop(items: Sequence[Object], pods: Pods) -> dict[str, int]:
    """Exit statuses by name; SIGKILL after the grace period."""
    for process in pods.values():
        process.send_signal(signal.SIGTERM)
    statuses = {}
    for each in items:
        if name(each) in pods:
            grace_s = pod(each)["spec"].get("terminationGracePeriodSeconds", 30)
            try:
                statuses[name(each)] = pods[name(each)].wait(grace_s)
            except subprocess.TimeoutExpired:
                pods[name(each)].kill()
                statuses[name(each)] = pods[name(each)].wait()
    return statuses


def main() -> None:
    items = workloads(OVERLAY)
    os.chdir(ROOT)
    make_root_read_only()
    loopback_up()
    pods: Pods = {}
    with TemporaryDirectory() as folder:
        name_hosts(hosts(items), Path(folder))
        try:
            for each in items:
                pods[name(each)] = started(each)
            for each in items:
                wait_started(each, pods[name(each)])
            result = answer()
            learned, scraped = outcomes(), metrics_ports_answer(items)
        finally:
            statuses = stop(items, pods)
    print(
        json.dumps(
            {"answer": result, "outcomes": learned, "scraped": scraped, "exit_statuses": statuses}
        )
    )


if __name__ == "__main__":
    main()

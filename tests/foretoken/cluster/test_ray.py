"""`foretoken serve --cluster ray` on a Ray cluster of two local nodes."""

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.live import ROOT, Live, command, environment, serving

WAIT_S = 120.0
CLUSTER = ("--gateways", "1", "--cluster", "ray", "--set", "tls.insecure=true")
EMULATED = ("--emulate", "h100-llama3-8b", *CLUSTER)
ATTACHED = re.compile(r"^foretoken_workers_attached (\d+)", re.MULTILINE)
LOST = re.compile(r"^foretoken_workers_lost_total (\d+)", re.MULTILINE)


def metric(live: Live, pattern: re.Pattern[str]) -> int:
    with urllib.request.urlopen(f"{live.http}/metrics", timeout=30) as response:
        found = pattern.search(response.read().decode())
    return int(found[1]) if found else 0


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.2)


def answer(live: Live) -> dict[str, Any]:
    body = {"model": "demo", "prompt": "Count from 3 to 12.", "max_tokens": 8}
    request = urllib.request.Request(
        f"{live.http}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        found: dict[str, Any] = json.load(response)
        return found


@pytest.mark.slow
def test_workers_run_on_two_nodes_and_move_when_one_is_lost(cluster: Cluster):
    with serving(*EMULATED, "--workers", "2") as live:
        assert metric(live, ATTACHED) == 2
        assert answer(live)["usage"]["completion_tokens"] >= 1
        cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
        wait_until(lambda: metric(live, LOST) == 1)
        assert answer(live)["usage"]["completion_tokens"] >= 1  # by the other worker
        wait_until(lambda: metric(live, ATTACHED) == 2)
        assert live.stop() == 0


@pytest.mark.slow
def test_setting_that_a_worker_rejects_ends_the_start_with_its_sentence(cluster: Cluster):
    done = subprocess.run(
        command("serve", *CLUSTER, "--device", "cuda:7"),
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 2
    assert "foretoken: device is cuda:7" in done.stderr


@pytest.mark.slow
def test_stop_and_a_second_start_on_the_same_cluster(cluster: Cluster):
    for _ in range(2):
        with serving(*EMULATED) as live:
            assert answer(live)["usage"]["completion_tokens"] >= 1
            assert live.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("address", ["", "127.0.0.1:1"])
def test_no_cluster_is_one_sentence(address: str, tmp_path: Path):
    """None is known, and the known one does not answer."""
    done = subprocess.run(
        command("serve", *EMULATED),
        env=environment() | {"RAY_ADDRESS": address, "RAY_TMPDIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    *_, message = done.stderr.splitlines()  # Ray logs that it cannot connect
    assert re.match(r"foretoken: --cluster ray finds no Ray cluster \(.+\); start one", message)

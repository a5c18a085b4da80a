"""CPU time of a reading of the gateway's /metrics, as pickers of other projects make them.

    python -m benchmarks.metrics_reads [--rate 20] [--seconds 10] [--rounds 3] [--checkout FOLDER]
                                       [--json FILE] [--quick]

`foretoken serve` with the demo model serves a light load. In turns nothing, `/version` (the cost of
any request), the whole of `/metrics` and the series that `foretoken epp` reads are read so many
times a second over one connection; the difference of the processes' CPU times is divided by the
readings. `--checkout` runs another checkout of the project, to compare with. A kept value is at
most `gateway.metrics_age_s` old.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

from benchmarks.harness.cpu import GATEWAY, read_cpu, spent
from benchmarks.harness.report import Measurements, parser, write
from benchmarks.harness.system import foretoken_system
from services.picker.core.endpoints import QUERY

PATHS = {"any": "/version", "all": "/metrics", "named": f"/metrics?{QUERY}"}
ROLES = (GATEWAY, "scheduler", "worker")  # the predictor trains at times of its own
LOAD_S = 0.25  # between two requests of the load
BODY = json.dumps({"prompt": "Count from 3 to 12.\n", "max_tokens": 40}).encode()
HEADERS = {"content-type": "application/json"}


@contextmanager
def light_load(url: str) -> Iterator[None]:
    """Four requests a second from a thread, so that some series change."""
    over = threading.Event()

    def send() -> None:
        connection = HTTPConnection(urlsplit(url).netloc)
        while not over.wait(LOAD_S):
            connection.request("POST", "/v1/completions", BODY, HEADERS)
            connection.getresponse().read()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def read(url: str, path: str, rate: float, seconds: float) -> tuple[int, int]:
    """Reads a path at a rate for a time; returns how many times, and the bytes of the last one.
    Without a path it only waits."""
    connection = HTTPConnection(urlsplit(url).netloc)
    began_s, count, size = time.monotonic(), 0, 0
    while (now := time.monotonic()) < began_s + seconds:
        if path:
            connection.request("GET", path)
            size = len(connection.getresponse().read())
            count += 1
        time.sleep(max(0.0, began_s + (count + 1) / rate - now) if path else seconds)
    return count, size


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rate", type=float, default=20.0, help="readings per second")
    options.add_argument("--seconds", type=float, default=10.0, help="of one turn")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--checkout", default="", help="the folder of another checkout")
    given = options.parse_args()
    seconds, rounds = (1.0, 1) if given.quick else (given.seconds, given.rounds)
    found = Measurements()
    system = foretoken_system("--gateways", "1", checkout=given.checkout)
    with system as running, light_load(running.http):
        for _ in range(rounds):
            idle: dict[str, float] = {}
            for name in ("", *PATHS):
                before = read_cpu(running.pid, "supervisor")
                count, size = read(running.http, PATHS.get(name, ""), given.rate, seconds)
                times = spent(before, read_cpu(running.pid, "supervisor"))
                if not name:
                    idle = times
                    continue
                for role in ROLES:
                    more_s = times.get(role, 0.0) - idle.get(role, 0.0)
                    found.add((name, f"{role}_ms"), more_s / count * 1e3)
                found.add((name, "bytes"), size)
    for name, quantity in found.values:
        print(f"{name:6} {quantity:14} {found.figure(name, quantity)}")
    write(given.json, {"rate": given.rate, "medians": found.medians(), "repeats": found.repeats()})


if __name__ == "__main__":
    main()

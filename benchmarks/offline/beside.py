"""How a batch behind other requests moves their latencies, simulated.

    python -m benchmarks.offline.beside --folder FOLDER [--requests N] [--rates A,B]
        [--in-flight A,B] [--preset NAME] [--seed S] [--json FILE] [--quick]

N requests arrive at a Poisson rate on one `h100-llama3-8b`. Beside them, a batch keeps `in-flight`
requests of the last priority running. 0 is no batch. Forecasts come from history.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness.report import parser, show, write
from benchmarks.offline.jobs import HARDWARE, read_job
from gateway.faces.http.batches.runner import LAST_PRIORITY
from services.core import Request
from services.policies.preset import presets
from services.scheduler.core.events import Submitted
from simulator.engine.events import Arrival
from simulator.engine.settings import RunSettings
from simulator.engine.simulation import GATEWAY, Simulation
from simulator.hardware.hardware_file import load_hardware
from simulator.workload.workload import Workload

QUICK_REQUESTS = 40
BATCH_LINES = 3_000  # more than a run needs
PERCENTILE = 99
HEAD = ("rate", "in flight", "p99 TTFT", "p99 TPOT", "p99 end to end", "batch tokens/s")


class Beside(Simulation):
    """The first `online` requests arrive in time; the others are a batch with `in_flight` at a
    time. The run ends with the last of the first."""

    def __init__(self, settings: RunSettings, workload: Workload, online: int, in_flight: int):
        super().__init__(settings, workload)
        self._online, self._in_flight = online, in_flight
        self._next_line = online

    def _begin_arrivals(self) -> None:
        self._queue.push(float(self.workload.arrival_s[0]), Arrival(0))
        self._fill_batch()

    def _arrive(self, row: int) -> None:
        if row + 1 < self._online:
            self._queue.push(float(self.workload.arrival_s[row + 1]), Arrival(row + 1))
        self.records.arrival_s[row] = self._now
        self._dispatch(Submitted(GATEWAY, self._request(row)))

    def _request(self, row: int) -> Request:
        priority = LAST_PRIORITY if row >= self._online else 0
        return replace(super()._request(row), priority=priority)

    def _end_request(self) -> None:
        ended = self.records.finished | self.records.rejected
        self._open = int((~ended[: self._online]).sum())
        self._fill_batch(int(ended[self._online :].sum()))

    def _fill_batch(self, ended: int = 0) -> None:
        most = min(len(self.workload), self._online + ended + self._in_flight)
        for row in range(self._next_line, most):
            self._queue.push(self._now + self._timing.hop_s, Arrival(row))
        self._next_line = max(self._next_line, most)


def measure(
    job: Workload, online: int, rate: float, in_flight: int, preset: str, seed: int
) -> dict[str, float]:
    """Percentiles of the first `online` requests in seconds, and the batch's tokens per second."""
    gaps_s = np.random.default_rng(seed).exponential(1 / rate, online)
    arrival_s = np.cumsum(gaps_s)
    lines = np.full(len(job) - online, arrival_s[-1])
    workload = replace(job, arrival_s=np.concatenate([arrival_s, lines]))
    hardware = load_hardware(HARDWARE)
    settings = RunSettings(presets()[preset], (hardware,), predictor="history")
    run = Beside(settings, workload, online, in_flight).run()
    served = run.records.select(np.arange(online))
    batch_tokens = float(run.records.tokens[online:].sum())
    return {
        "ttft_s": float(np.percentile(served.ttft_s, PERCENTILE)),
        "tpot_s": float(np.percentile(served.tpot_s, PERCENTILE)),
        "e2e_s": float(np.percentile(served.e2e_s, PERCENTILE)),
        "batch_tokens_per_s": batch_tokens / run.end_s,
    }


def compare(found: Sequence[dict[str, float]]) -> list[list[str]]:
    """A row of HEAD for each run, relative to the first run of its rate."""
    rows = []
    for run in found:
        base = next(each for each in found if each["rate"] == run["rate"])
        moved = [
            f"{run[name] * 1e3:.1f} ms ({run[name] / base[name] - 1:+.1%})"
            for name in ("ttft_s", "tpot_s", "e2e_s")
        ]
        batch = f"{run['batch_tokens_per_s']:,.0f}"
        rows.append([f"{run['rate']:g}", f"{run['in_flight']:.0f}", *moved, batch])
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path, required=True, help="the folder of the prompts")
    arguments.add_argument("--requests", type=int, default=500)
    arguments.add_argument("--rates", default="3,10,20")
    arguments.add_argument("--in-flight", default="0,4")
    arguments.add_argument("--preset", default="foretoken")
    arguments.add_argument("--seed", type=int, default=0)
    args = arguments.parse_args()
    online = QUICK_REQUESTS if args.quick else args.requests
    job = read_job(args.folder, online + (0 if args.quick else BATCH_LINES) + 50, args.seed)
    found = [
        {
            "rate": float(rate),
            "in_flight": float(in_flight),
            **measure(job, online, float(rate), int(in_flight), args.preset, args.seed),
        }
        for rate in args.rates.split(",")
        for in_flight in args.in_flight.split(",")
    ]
    title = f"{online:,} requests beside a batch, {args.preset}, {HARDWARE}"
    show(title, HEAD, compare(found))
    write(args.json, {"runs": found})


if __name__ == "__main__":
    main()

"""The simulator's error against live runs: an error matrix of presets, loads and dtypes.

    python -m benchmarks.twin [--presets a,b] [--factors 0.5,0.9,1.6] [--seconds 15]
        [--dtypes bfloat16] [--json FILE] [--markdown FILE] [--logs FOLDER] [--quick]

The whole system serves the padded demo model (`models.padded`) through HTTP and
writes event logs. A run of `fcfs` with a full queue, then with half of the capacity that it found,
calibrates the hardware. Then each preset gets Poisson arrivals at the factors of the capacity, one
server per preset, and `simulator.twin` simulates its log three times:

  calibrated  on the hardware of the calibration run: no step time of the run itself is used
  own steps   on hardware fitted to the run's own steps, as `foretoken twin LOG` does
  own speed   as own steps, with the machine's speed at each time of the run (`--follow-speed`)

The machine's speed varies between runs, which the second leaves out, and within a run, which the
third leaves out as well: its error is the simulator's own. The latencies of the control plane are
those of each log.

Errors are (simulated - measured) / measured of a figure; goodput is in points. A run takes about 50
s for each preset and dtype, 3 s for each factor, and 2.5 times the seconds of arrivals.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import uvloop

from benchmarks.harness.report import parser, show, write
from benchmarks.harness.system import foretoken_system, settings
from benchmarks.overload.demo_load import DueRequest, burst_load, draw_bodies, poisson_load
from benchmarks.overload.figures import RAMP_SHARE, tokens_per_s
from benchmarks.overload.open_loop import Answer, send_load
from benchmarks.overload.systems import KV_TOKENS, padded_demo_model, wait_until_idle
from services.runtime.process_limits import raise_open_file_limit
from simulator.hardware.hardware import Hardware
from simulator.twin.comparison import Comparison, Figure, compare
from simulator.twin.recorded_run import RecordedLog, read_run
from simulator.twin.twin import measured_hardware, simulate_twin

PRESETS = "fcfs,past-future,alise,ltr,foretoken"
FACTORS, SECONDS = "0.5,0.9,1.6", 15.0
WARM_UP = 40  # requests of a server that do not count
BURST = 150  # requests that measure the capacity
TIMEOUT_S = 60.0
HEAD = ("hardware", "preset", "load", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50", "p99",
        "makespan", "goodput")  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One load of a preset, compared with each of its twins. `client_ttft_s` is the median that
    the client measured from the due time, which includes HTTP, the gateway and the client."""

    hardware: str
    preset: str
    factor: float
    twins: Mapping[str, Comparison]
    client_ttft_s: float


@contextmanager
def recording(preset: str, folder: str, dtype: str, log: Path) -> Iterator[str]:
    """Serves a preset; yields the HTTP address. The log is complete afterwards."""
    choices = settings(f"scheduler.policy={preset}", "log.path=", f"scheduler.event_log={log}")
    model = ("--model", folder, "--dtype", dtype, "--kv-tokens", str(KV_TOKENS))
    with foretoken_system(*model, *choices) as system:
        yield system.http


async def send_loads(url: str, loads: Sequence[Sequence[DueRequest]]) -> list[list[Answer]]:
    """Sends one load after the other, each to an idle server. Raises RuntimeError if a request
    fails: a load would have fewer requests in the log than its size."""
    answers = []
    for load in loads:
        await wait_until_idle(url)
        answers.append(await send_load(url, load, TIMEOUT_S))
        if failed := [answer.problem for answer in answers[-1] if answer.problem]:
            raise RuntimeError(f"{len(failed)} of {len(load)} requests failed: {failed[0]}")
    return answers


def calibrate(folder: str, dtype: str, log: Path, seconds: float) -> tuple[Hardware, float]:
    """The hardware, and the requests per second that `fcfs` serves with a full queue."""

    async def run(url: str) -> float:
        loads = [burst_load(draw_bodies(WARM_UP, seed=1)), burst_load(draw_bodies(BURST, seed=2))]
        _, answers = await send_loads(url, loads)
        end_s = max(answer.last_s for answer in answers)
        tokens_s = tokens_per_s(answers, RAMP_SHARE * end_s, (1 - RAMP_SHARE) * end_s)
        rate = tokens_s / float(np.mean([answer.tokens for answer in answers]))
        half = draw_bodies(max(1, round(rate / 2 * seconds)), seed=4)
        await send_loads(url, [poisson_load(half, rate / 2, seed=4)])
        return rate

    with recording("fcfs", folder, dtype, log) as url:
        rate = uvloop.run(run(url))
    [hardware] = measured_hardware(read_run(log).run)
    return hardware, rate


def measure(
    preset: str, folder: str, dtype: str, log: Path, rates: Sequence[float], seconds: float
) -> list[list[Answer]]:
    """Records one preset at all rates; returns the answers, those of the warm-up first."""
    loads = [poisson_load(draw_bodies(WARM_UP, seed=3), rates[0], seed=3)]
    for number, rate in enumerate(rates):
        bodies = draw_bodies(max(1, round(rate * seconds)), seed=10 + number)
        loads.append(poisson_load(bodies, rate, seed=10 + number))
    with recording(preset, folder, dtype, log) as url:
        return uvloop.run(send_loads(url, loads))


def compare_loads(
    recorded: RecordedLog, calibrated: Hardware, sizes: Sequence[int]
) -> Iterator[dict[str, Comparison]]:
    """The errors of each load after the first, by twin."""
    run = recorded.run
    own = measured_hardware(run)
    twins = {
        "calibrated": simulate_twin(recorded, [calibrated], run.timing),
        "own steps": simulate_twin(recorded, own, run.timing),
        "own speed": simulate_twin(recorded, own, run.timing, follow_speed=True),
    }
    begins = np.cumsum([0, *sizes]).tolist()
    for begin, end in pairwise(begins[1:]):
        yield {name: compare(run, twin, among=range(begin, end)) for name, twin in twins.items()}


def cells(options: Namespace, logs: Path) -> Iterator[Cell]:
    factors = [float(factor) for factor in options.factors.split(",")]
    with padded_demo_model() as folder:
        for dtype in options.dtypes.split(","):
            name = f"cpu, padded demo, {dtype}"
            log = logs / f"calibration-{dtype}.log"
            hardware, capacity = calibrate(folder, dtype, log, options.seconds)
            print(f"{name}: {capacity:.1f} requests/s, {hardware.cost}", file=sys.stderr)
            for preset in options.presets.split(","):
                print(f"{name}: {preset}", file=sys.stderr)
                log = logs / f"{preset}-{dtype}.log"
                rates = [factor * capacity for factor in factors]
                answers = measure(preset, folder, dtype, log, rates, options.seconds)
                errors = compare_loads(read_run(log), hardware, [len(each) for each in answers])
                for factor, found, mine in zip(factors, errors, answers[1:], strict=True):
                    ttft_s = float(np.median([answer.ttft_s for answer in mine]))
                    yield Cell(name, preset, factor, found, ttft_s)


def errors_of(found: Comparison) -> list[float]:
    """In the order of HEAD; goodput as a difference of shares."""
    latencies = [found.latencies[name] for name in ("ttft_s", "tpot_s", "e2e_s")]
    errors = [figure.error for each in latencies for figure in (each.median, each.p99)]
    return [*errors, found.makespan_s.error, found.goodput.simulated - found.goodput.measured]


def table_row(cell: Cell, found: Comparison) -> list[str]:
    *errors, points = errors_of(found)
    shown = [f"{error:+.1%}" for error in errors]
    return [cell.hardware, cell.preset, f"{cell.factor:g}", *shown, f"{100 * points:+.1f}"]


def last_row(all_found: Sequence[Comparison]) -> list[str]:
    """The median over all cells of the absolute errors."""
    columns = np.median(np.abs([errors_of(found) for found in all_found]), axis=0).tolist()
    shown = [f"{error:.1%}" for error in columns[:-1]]
    return ["median of absolute errors", "", "", *shown, f"{100 * columns[-1]:.1f}"]


def as_record(found: Comparison) -> dict[str, object]:
    figures: dict[str, Figure] = {
        f"{name}_{part}": getattr(latency, part)
        for name, latency in found.latencies.items()
        for part in ("mean", "median", "p99")
    }
    figures |= {name: getattr(found, name) for name in ("makespan_s", "goodput", "step_s")}
    return {
        "requests": found.requests,
        **{name: {"measured": f.measured, "simulated": f.simulated} for name, f in figures.items()},
        **{f"{name}_request_error_p50": c.request_error_p50 for name, c in found.latencies.items()},
    }


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> None:
    options = _options()
    raise_open_file_limit()
    with TemporaryDirectory(prefix="foretoken-twin-") as folder:
        found = list(cells(options, options.logs or Path(folder)))
    tables = {}
    for twin in found[0].twins:
        rows = [table_row(cell, cell.twins[twin]) for cell in found]
        tables[twin] = [*rows, last_row([cell.twins[twin] for cell in found])]
    for title, rows in tables.items():
        show(title, HEAD, rows, width=150)
    if options.markdown:
        parts = (f"{title}:\n\n{markdown(HEAD, rows)}" for title, rows in tables.items())
        options.markdown.write_text("\n".join(parts))
    records = [
        {
            "hardware": cell.hardware,
            "preset": cell.preset,
            "factor": cell.factor,
            "client_ttft_s": cell.client_ttft_s,
            **{twin: as_record(comparison) for twin, comparison in cell.twins.items()},
        }
        for cell in found
    ]
    write(options.json, {"kv_tokens": KV_TOKENS, "seconds": options.seconds, "rows": records})


def _options() -> Namespace:
    options = parser(__doc__)
    add = options.add_argument
    add("--presets", help=f"default: {PRESETS}")
    add("--factors", help=f"of the capacity; default: {FACTORS}")
    add("--seconds", type=float, help=f"of arrivals at each factor; default: {SECONDS:g}")
    add("--dtypes", default="bfloat16", help="of the model; default: bfloat16")
    add("--markdown", type=Path, help="write the tables to this file")
    add("--logs", type=Path, help="keep the event logs in this folder")
    given = options.parse_args()
    given.presets = given.presets or ("fcfs" if given.quick else PRESETS)
    given.factors = given.factors or ("0.9" if given.quick else FACTORS)
    given.seconds = given.seconds or (4.0 if given.quick else SECONDS)
    if given.logs:
        given.logs.mkdir(parents=True, exist_ok=True)
    return given


if __name__ == "__main__":
    main()

"""The cost of a round: the snapshot, the decision and the plans, with a separate forecast for every
request.

    python -m benchmarks.policy [--presets a,b,c] [--turns N] [--json FILE] [--quick]

One row per preset. Times are medians over the rounds, with the 99th percentile; a median above its
target (1 ms at 64 running and 1,000 queued, 3 ms at 256 + 10,000, 10 ms at 1,024 + 10,000; 20 ms at
64 + 1,000 if the whole pool is cut into batches) is marked. For three presets the same round is
also arranged by a batcher process over a socket of this machine, including encoding and applying.
The report column is the cost of a worker's report per request.

For presets that cut the pool into batches, the measured rounds are the expensive ones: the running
batch has ended, and all waiting requests are cut again. `running` in the record is the number
running afterwards.
"""

import asyncio
import sys
import time
from argparse import Namespace
from math import inf
from statistics import median

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.harness.report import parser, show, write
from benchmarks.harness.rounds import Busy, RoundTimes, measure
from foretoken.running.ports import free_port
from services.policies.preset import choose, presets
from services.runtime.channel import connect
from services.scheduler.core import events as ev
from services.scheduler.core.state import SchedulerState
from services.scheduler.links.batcher import BatcherLink
from services.scheduler.observe.metrics import SchedulerMetrics

SIZES = [(r, q) for r in (64, 256, 1_024) for q in (100, 1_000, 10_000)]
QUICK_SIZES = [(64, 100), (64, 1_000)]
APART = ("fcfs", "past-future", "alise")
REACHES_MS = {(64, 1_000): 1.0, (256, 10_000): 3.0, (1_024, 10_000): 10.0}
BATCH_REACHES_MS = {(64, 1_000): 20.0}  # of those that cut the whole pool into batches
WIDTH = 160  # of the tables, in characters


def main() -> None:
    args = _given()
    sizes = QUICK_SIZES if args.quick else SIZES
    turns = args.turns or (10 if args.quick else 60)
    chosen = args.presets.split(",") if args.presets else list(presets())
    began_s = time.perf_counter()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for policy in chosen:
        figures[policy] = {_size(*size): _measured(policy, *size, turns) for size in sizes}
    for policy in APART if not args.quick else APART[:1]:
        if policy in chosen:
            for running, queued in sizes:
                figure = figures[policy][_size(running, queued)]
                figure |= asyncio.run(_measure_remote_batcher(policy, running, queued, turns))
    head = ("preset", *(_size(*size) for size in sizes))
    show(
        "A planning round, by running+queued: ms, median/p99; ! is over its reach",
        head,
        [(policy, *map(_cell, by.values())) for policy, by in figures.items()],
        WIDTH,
    )
    show(
        "A worker's report, µs a request in it",
        head,
        [
            (policy, *(f"{f['report_us']:.2f}" for f in by.values()))
            for policy, by in figures.items()
        ],
        WIDTH,
    )
    apart = {policy: by for policy, by in figures.items() if "apart_ms" in next(iter(by.values()))}
    if apart:
        show(
            "The same round arranged by a batcher of its own: ms, median",
            head,
            [
                (policy, *(f"{f['apart_ms']:.2f}" for f in by.values()))
                for policy, by in apart.items()
            ],
            WIDTH,
        )
    print(f"{len(chosen)} presets in {time.perf_counter() - began_s:.0f} s")
    rounds = {f"{name}/{size}": f for name, by in figures.items() for size, f in by.items()}
    write(args.json, {"rounds": rounds, "turns": turns})


def _given() -> Namespace:
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--presets", default="", help="names, by commas; all unless given")
    options.add_argument("--turns", type=int, default=0, help="rounds measured of each; 60")
    return options.parse_args()


def _size(running: int, queued: int) -> str:
    return f"{running}+{queued}"


def _measured(policy: str, running: int, queued: int, turns: int) -> dict[str, float]:
    """One preset at one size. `over_reach`: its median is above the target."""
    busy, took = measure(policy, running, queued, turns)
    batches = choose(policy).arrangement == "batch"
    reach_ms = (BATCH_REACHES_MS if batches else REACHES_MS).get((running, queued), inf)
    round_ms = median(took.rounds_ms)
    return {
        "running": busy.running,
        "round_ms": round_ms,
        "round_p95_ms": float(np.quantile(took.rounds_ms, 0.95)),
        "round_p99_ms": float(np.quantile(took.rounds_ms, 0.99)),
        "report_us": median(took.report_us),
        "over_reach": float(round_ms > reach_ms),
    }


def _cell(figure: dict[str, float]) -> str:
    mark = "!" if figure["over_reach"] else ""
    return f"{figure['round_ms']:.2f}/{figure['round_p99_ms']:.2f}{mark}"


async def _measure_remote_batcher(
    policy: str, running: int, queued: int, turns: int
) -> dict[str, float]:
    """The same turns, arranged by a real batcher process."""
    address = f"127.0.0.1:{free_port()}"
    settings = ("--set", f"batcher.address={address}", "--set", "batcher.log_level=WARNING")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.batcher", *settings
    )
    channel = connect(address)
    try:
        await asyncio.wait_for(channel.channel_ready(), 30)
        busy = Busy(policy, running, queued, apart=True)
        arranged: asyncio.Queue[ev.Arranged] = asyncio.Queue()
        registry = CollectorRegistry()
        metrics = SchedulerMetrics(registry)
        table = busy.state.ledger.board.forecasts
        preset = busy.state.preset
        arranger = BatcherLink(channel, preset, table, 10.0, metrics, arranged.put_nowait)
        follow = asyncio.create_task(arranger.run())
        await asyncio.sleep(0.2)
        times_ms = [await _time_remote_round(busy, arranger, arranged) for _ in range(turns + 5)]
        follow.cancel()
        counted = "foretoken_scheduler_rounds_arranged_total"
        by_batcher = registry.get_sample_value(counted, {"by": "batcher"}) or 0.0
        return {"apart_ms": median(times_ms[5:]), "apart_rounds": by_batcher}
    finally:
        await channel.close()
        process.terminate()
        await process.wait()


def _defer_round(state: SchedulerState, now: float) -> list[ev.Action]:
    """Defers the round to the caller."""
    return []


async def _time_remote_round(
    busy: Busy, arranger: BatcherLink, arranged: "asyncio.Queue[ev.Arranged]"
) -> float:
    """Milliseconds from the snapshot to the plans, the way there and back included."""
    busy.turn(_defer_round, RoundTimes())
    state, now = busy.state, busy.now
    began = time.perf_counter()
    state.step(ev.Round(), now)
    if state.rounds.candidates:
        arranger.ask(state.rounds.candidates)
        state.step(await arranged.get(), now)
    return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    main()

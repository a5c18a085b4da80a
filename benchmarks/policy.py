"""What a round costs: the snapshot, the decision and the plans, with a forecast of its own for
every request.

    python -m benchmarks.policy [--presets a,b,c] [--json FILE] [--quick]

`apart` is the same round arranged by a batcher in a process of its own, over a socket of this
machine: asked, encoded, answered and carried out. `report` is what a worker's progress costs a
request. Times are medians over the rounds, with the 95th percentile.
"""

import asyncio
import sys
import time
from statistics import median
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.report import parser, show, write
from benchmarks.rounds import Busy, Took, measure
from foretoken.ports import free_port
from services.policies.preset import presets
from services.runtime.channel import connect
from services.scheduler import events as ev
from services.scheduler.arranger import Arranger
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.state import SchedulerState

SIZES = [(r, q) for r in (64, 256, 1_024) for q in (100, 1_000, 10_000)]
QUICK_SIZES = [(64, 100), (64, 1_000)]
APART = ("fcfs", "past-future", "alise")


def main() -> None:
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--presets", default=",".join(presets()), help="names, by commas")
    args = options.parse_args()
    sizes, turns = (QUICK_SIZES, 10) if args.quick else (SIZES, 60)
    figures: dict[str, Any] = {}
    for policy in args.presets.split(","):
        for running, queued in sizes:
            busy, took = measure(policy, running, queued, turns)
            figures[f"{policy}/{running}+{queued}"] = _figures(busy, took)
    for policy in APART if not args.quick else APART[:1]:
        if policy in args.presets.split(","):
            for running, queued in sizes:
                key = f"{policy}/{running}+{queued}"
                figures[key] |= asyncio.run(_apart(policy, running, queued, turns))
    head = ("preset/running+queued", "ran", "round ms", "p95 ms", "report µs", "apart ms")
    show("A planning round", head, [(key, *_row(each)) for key, each in figures.items()])
    write(args.json, {"rounds": figures})


def _figures(busy: Busy, took: Took) -> dict[str, float]:
    return {
        "running": busy.running,
        "round_ms": median(took.rounds_ms),
        "round_p95_ms": float(np.quantile(took.rounds_ms, 0.95)),
        "report_us": median(took.report_us),
    }


def _row(figure: dict[str, float]) -> tuple[str, ...]:
    apart = f"{figure['apart_ms']:.2f}" if "apart_ms" in figure else ""
    return (
        f"{figure['running']:.0f}",
        f"{figure['round_ms']:.2f}",
        f"{figure['round_p95_ms']:.2f}",
        f"{figure['report_us']:.2f}",
        apart,
    )


async def _apart(policy: str, running: int, queued: int, turns: int) -> dict[str, float]:
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
        arranger = Arranger(channel, preset, table, 10.0, metrics, arranged.put_nowait)
        follow = asyncio.create_task(arranger.run())
        await asyncio.sleep(0.2)
        times_ms = [await _round_apart(busy, arranger, arranged) for _ in range(turns + 5)]
        follow.cancel()
        counted = "foretoken_scheduler_rounds_arranged_total"
        by_batcher = registry.get_sample_value(counted, {"by": "batcher"}) or 0.0
        return {"apart_ms": median(times_ms[5:]), "apart_rounds": by_batcher}
    finally:
        await channel.close()
        process.terminate()
        await process.wait()


def _later(state: SchedulerState, now: float) -> list[ev.Action]:
    """The round is made by who asks for this."""
    return []


async def _round_apart(
    busy: Busy, arranger: Arranger, arranged: "asyncio.Queue[ev.Arranged]"
) -> float:
    """Milliseconds from the snapshot to the plans, the way there and back included."""
    busy.turn(_later, Took())
    state, now = busy.state, busy.now
    began = time.perf_counter()
    state.step(ev.Round(), now)
    if state.rounds.contest:
        arranger.ask(state.rounds.contest)
        state.step(await arranged.get(), now)
    return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    main()

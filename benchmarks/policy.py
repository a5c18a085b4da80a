"""Cost of a scheduling round: snapshot, decision and plans.

    python -m benchmarks.policy [--presets a,b,c] [--sizes 256+10000] [--turns N] [--json FILE]
                                [--quick]

Every request has a separate forecast. A table has one row per preset. Times are CPU times of this
process, so that other load on the machine counts little: medians over the rounds, with the 99th
percentile. A median above its target is marked: 1 ms at 64 running and 1,000 queued, 3 ms at 256 +
10,000, 10 ms at 1,024 + 10,000. The second table divides the rounds of one size into their parts,
and adds what follows them outside the state: stories, metrics and encoded messages. The third is
the cost of a worker's report per request. For three presets a batcher process also arranges the
same round over a local socket; that is elapsed time, and includes encoding and applying.

With presets that divide the pool into batches, the running batch has ended and the next one
begins. `anew` is the round in which all waiting requests are divided again, as after a restart; its
target is 20 ms at 64 + 1,000. `running` in the record is the number of running requests afterwards.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from statistics import median

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.harness.report import parser, show, write
from benchmarks.harness.rounds import PARTS, BusyScheduler, RoundTimes, measure
from benchmarks.harness.system import running, settings
from foretoken.running.ports import free_port
from services.policies.preset import presets
from services.runtime.network.channel import connect
from services.scheduler.core import events as ev
from services.scheduler.links.batcher import BatcherLink
from services.scheduler.observe.metrics import SchedulerMetrics

SIZES = [(r, q) for r in (64, 256, 1_024) for q in (100, 1_000, 10_000)]
QUICK_SIZES = [(64, 100), (64, 1_000)]
REMOTE = ("fcfs", "past-future", "alise")  # also arranged by a batcher process
PARTS_OF = (256, 10_000)  # the size of the second table
TARGETS_MS = {(64, 1_000): 1.0, (256, 10_000): 3.0, (1_024, 10_000): 10.0}
ANEW_TARGETS_MS = {(64, 1_000): 20.0}  # where all waiting requests are divided again
WIDTH = 160  # of the tables, in characters

Figures = dict[str, float]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--presets", default="", help="names, separated by commas; default: all")
    options.add_argument("--sizes", default="", help="running+queued, separated by commas")
    options.add_argument("--turns", type=int, default=0, help="measured rounds of each; default 60")
    args = options.parse_args()
    sizes = _sizes(args.sizes) if args.sizes else QUICK_SIZES if args.quick else SIZES
    turns = args.turns or (10 if args.quick else 60)
    chosen = args.presets.split(",") if args.presets else list(presets())
    began_s = time.perf_counter()
    figures = {
        policy: {f"{r}+{q}": _measure(policy, r, q, turns) for r, q in sizes} for policy in chosen
    }
    remote = [policy for policy in (REMOTE[:1] if args.quick else REMOTE) if policy in chosen]
    for policy in remote:
        for r, q in sizes:
            figures[policy][f"{r}+{q}"] |= asyncio.run(_measure_remote(policy, r, q, turns))

    def table(title: str, policies: Sequence[str], cell: Callable[[Figures], str]) -> None:
        head = ("preset", *(f"{r}+{q}" for r, q in sizes))
        show(title, head, [(p, *map(cell, figures[p].values())) for p in policies], WIDTH)

    table("A round, by running+queued: ms, median/p99; ! is over its target", chosen, _round_cell)
    r, q = PARTS_OF if PARTS_OF in sizes else sizes[-1]
    head = ("preset", "round", *PARTS, "publish", "anew")
    rows = [(p, *_part_cells(figures[p][f"{r}+{q}"])) for p in chosen]
    show(f"Parts of a round at {r}+{q}, and what follows it: ms, median", head, rows, WIDTH)
    table("A worker's report, µs per request in it", chosen, lambda f: f"{f['report_us']:.2f}")
    if remote:
        title = "The same round arranged by a batcher process: ms, median"
        table(title, remote, lambda f: f"{f['apart_ms']:.2f}")
    print(f"{len(chosen)} presets in {time.perf_counter() - began_s:.0f} s")
    rounds = {f"{name}/{size}": f for name, by in figures.items() for size, f in by.items()}
    write(args.json, {"rounds": rounds, "turns": turns})


def _sizes(given: str) -> list[tuple[int, int]]:
    pairs = [size.split("+") for size in given.split(",")]
    return [(int(running), int(queued)) for running, queued in pairs]


def _measure(policy: str, running: int, queued: int, turns: int) -> Figures:
    """Measures one preset at one size. `over_target`: its median is above the target."""
    scheduler, times = measure(policy, running, queued, turns, anew=False)
    round_ms = median(times.rounds_ms)
    figures = {
        "running": scheduler.running,
        "round_ms": round_ms,
        "round_p95_ms": float(np.quantile(times.rounds_ms, 0.95)),
        "round_p99_ms": float(np.quantile(times.rounds_ms, 0.99)),
        **{
            f"{name}_ms": median(parts[at] for parts in times.parts_ms)
            for at, name in enumerate(PARTS)
        },
        "publish_ms": median(times.publish_ms),
        "report_us": median(times.report_us),
        "over_target": float(round_ms > TARGETS_MS.get((running, queued), inf)),
    }
    if scheduler.makes_batches:
        anew_ms = median(measure(policy, running, queued, turns)[1].rounds_ms)
        figures["anew_ms"] = anew_ms
        figures["anew_over_target"] = float(anew_ms > ANEW_TARGETS_MS.get((running, queued), inf))
    return figures


def _round_cell(figures: Figures) -> str:
    mark = "!" if figures["over_target"] else ""
    return f"{figures['round_ms']:.2f}/{figures['round_p99_ms']:.2f}{mark}"


def _part_cells(figures: Figures) -> list[str]:
    names = ("round", *PARTS, "publish", "anew")
    return [f"{figures[f'{n}_ms']:.2f}" if f"{n}_ms" in figures else "" for n in names]


async def _measure_remote(policy: str, running_jobs: int, queued: int, turns: int) -> Figures:
    """Measures the same rounds, arranged by a real batcher process."""
    address = f"127.0.0.1:{free_port()}"
    choices = settings(f"batcher.address={address}", "batcher.log_level=WARNING")
    with running([sys.executable, "-m", "services.batcher", *choices]):
        channel = connect(address)
        await asyncio.wait_for(channel.channel_ready(), 30)
        scheduler = BusyScheduler(policy, running_jobs, queued, apart=True)
        arranged: asyncio.Queue[ev.Arranged] = asyncio.Queue()
        registry = CollectorRegistry()
        metrics = SchedulerMetrics(registry)
        table = scheduler.state.ledger.board.forecasts
        preset = scheduler.state.preset
        link = BatcherLink(channel, preset, table, 10.0, metrics, arranged.put_nowait)
        following = asyncio.create_task(link.run())
        await asyncio.sleep(0.2)
        times_ms = [await _time_remote_round(scheduler, link, arranged) for _ in range(turns + 5)]
        following.cancel()
        await channel.close()
    counter = "foretoken_scheduler_rounds_arranged_total"
    by_batcher = registry.get_sample_value(counter, {"by": "batcher"}) or 0.0
    return {"apart_ms": median(times_ms[5:]), "apart_rounds": by_batcher}


async def _time_remote_round(
    scheduler: BusyScheduler, link: BatcherLink, arranged: "asyncio.Queue[ev.Arranged]"
) -> float:
    """Returns milliseconds from the snapshot to the plans, including both ways to the batcher."""
    scheduler.turn(lambda *_: [], RoundTimes())  # the round is arranged below
    state, now = scheduler.state, scheduler.now
    began_s = time.perf_counter()
    state.step(ev.Round(), now)
    if state.rounds.candidates:
        link.ask(state.rounds.candidates)
        state.step(await arranged.get(), now)
    took_s = time.perf_counter() - began_s
    scheduler.publish()
    return took_s * 1e3


if __name__ == "__main__":
    main()

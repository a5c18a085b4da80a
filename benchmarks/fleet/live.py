"""The scheduler of a live fleet of emulated workers, with so many running and waiting requests.

    python -m benchmarks.fleet.live [--presets a,b] [--workers 64] [--gateways 4]
        [--size 4096+20000] [--step-s S] [--seconds S] [--set KEY=VALUE] [--json FILE] [--quick]

`foretoken serve` starts each worker and gateway as a process. Workers are slow, so that a small
machine can stream what all of them make: a step takes S seconds. As many
clients as requests run and wait send one request after the other over gRPC. When the queue is full,
the scheduler is observed: the CPU time of its rounds by its own histogram (mean, quantiles that are
interpolated in it, and the share of at most 10 ms), rounds per second and their share of a core,
and what ran and waited.
"""

import asyncio
import time
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import uvloop

from benchmarks.harness.histograms import quantile, read_buckets
from benchmarks.harness.report import parser, show, write
from benchmarks.harness.system import System, foretoken_system, settings, sum_metrics
from foretoken import AsyncClient, Overloaded
from observability.metrics.scheduler import ROUND
from services.runtime.process_limits import raise_open_file_limit

HARDWARE = "v100-32g-opt-13b"
SLOT_TOKENS = 640  # of KV for each running request, as in the rounds of `benchmarks.fleet`
MAX_TOKENS = 1_024
TARGET_S = 0.01
FULL_SHARE = 0.95  # of the size, from which on the scheduler is observed
CHANNELS = 4  # to each gateway, on average
STARTS_PER_S = 400  # clients; a gateway refuses many prompts at once
FILL_S = 400.0
WIDTH = 160

Figures = dict[str, float]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--presets", default="foretoken", help="names, separated by commas")
    options.add_argument("--workers", type=int, help="default: 64; 9 with --quick")
    options.add_argument("--gateways", type=int, default=4)
    options.add_argument("--size", help="running+queued requests; default: 4096+20000")
    options.add_argument("--step-s", type=float, default=1.0, help="seconds of a worker's step")
    options.add_argument("--seconds", type=float, default=60.0, help="of observation")
    options.add_argument("--set", action="append", default=[], help="a setting of the server")
    args = options.parse_args()
    raise_open_file_limit()
    figures = {preset: _measure(preset, args) for preset in args.presets.split(",")}
    head = ("preset", "round: mean ms", "p50", "p99", "≤ 10 ms", "rounds/s", "share of a core")
    rows = [(preset, *_cells(each)) for preset, each in figures.items()]
    show("The scheduler of a live fleet", (*head, "run", "wait", "tokens/s"), rows, WIDTH)
    given = {key: value for key, value in vars(args).items() if key != "json"}
    write(args.json, {"fleets": figures, "options": given})


def _measure(preset: str, args: Namespace) -> Figures:
    workers = args.workers or (9 if args.quick else 64)
    size = args.size or ("36+60" if args.quick else "4096+20000")
    running, queued = map(int, size.split("+"))
    with _fleet(preset, workers, running, queued, args) as system:
        return uvloop.run(_observe(system, running, queued, args))


@contextmanager
def _fleet(
    preset: str, workers: int, running: int, queued: int, args: Namespace
) -> Iterator[System]:
    slots, total = running // workers, running + queued
    chosen = settings(
        f"emulation.base_s={args.step_s}",
        "emulation.median_tokens=150",
        "emulation.sigma=0.9",
        f"worker.max_running={slots}",
        f"scheduler.max_queue={2 * total}",
        "scheduler.round_share=0.5",
        f"gateway.max_sessions={args.gateways * total}",
        *args.set,
    )
    with foretoken_system(
        *("--emulate", HARDWARE, "--workers", str(workers)),
        *("--gateways", str(args.gateways), "--policy", preset),
        *("--kv-tokens", str(slots * SLOT_TOKENS), *chosen),
    ) as system:
        yield system


async def _observe(system: System, running: int, queued: int, args: Namespace) -> Figures:
    """Fills the fleet with requests, and returns the figures of the time after that."""
    clients = [AsyncClient(system.grpc) for _ in range(CHANNELS * args.gateways)]
    tokens = [0]
    async with asyncio.TaskGroup() as group:
        users = [
            group.create_task(_use(clients[nth % len(clients)], nth, tokens))
            for nth in range(running + queued)
        ]
        await asyncio.to_thread(_wait_until_full, system, running, queued)
        first, made, began_s = await asyncio.to_thread(_read, system), tokens[0], time.monotonic()
        loads = []
        for _ in range(round(args.seconds)):
            await asyncio.sleep(1.0)
            loads.append(_load(await asyncio.to_thread(_read, system)))
        last, took_s = await asyncio.to_thread(_read, system), time.monotonic() - began_s
        for user in users:
            user.cancel()
    for client in clients:
        await client.close()
    ran, waited = np.mean(loads, axis=0).tolist()
    return {
        **_scheduler_figures(first, last, took_s),
        "running": ran,
        "waiting": waited,
        "tokens_per_s": (tokens[0] - made) / took_s,
    }


async def _use(client: AsyncClient, nth: int, tokens: list[int]) -> None:
    """Sends requests, one after the other, and counts their tokens. A refused one is sent again."""
    rng = np.random.default_rng(nth)
    await asyncio.sleep(nth / STARTS_PER_S)
    while True:
        prompt = rng.integers(10, 200, int(rng.integers(16, 512))).tolist()
        try:
            async for chunk in client.generate(tokens=prompt, max_tokens=MAX_TOKENS):
                tokens[0] += len(chunk.token_ids)
        except Overloaded as refusal:
            await asyncio.sleep(max(1.0, refusal.retry_after_s))


def _read(system: System) -> str:
    with urllib.request.urlopen(f"{system.http}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def _load(metrics: str) -> tuple[float, float]:
    """The requests that run, and those that wait."""
    totals = sum_metrics(metrics)
    return totals["scheduler_requests_running"], totals["scheduler_requests_waiting"]


def _wait_until_full(system: System, running: int, queued: int) -> None:
    """Raises RuntimeError after FILL_S."""
    until_s, ran, waited = time.monotonic() + FILL_S, 0.0, 0.0
    while ran < FULL_SHARE * running or ran + waited < FULL_SHARE * (running + queued):
        if time.monotonic() > until_s:
            raise RuntimeError(f"after {FILL_S:g} s only {ran:.0f} run and {waited:.0f} wait")
        time.sleep(1.0)
        ran, waited = _load(_read(system))


def _scheduler_figures(first: str, last: str, took_s: float) -> Figures:
    """Of the rounds between two readings of the metrics."""
    before = dict(read_buckets(first, ROUND.family))
    buckets = [(le, n - before.get(le, 0.0)) for le, n in read_buckets(last, ROUND.family)]
    was, now = sum_metrics(first), sum_metrics(last)

    def since(name: str) -> float:
        return now[name] - was[name]

    rounds = since("scheduler_round_seconds_count")
    return {
        "round_ms": 1e3 * since("scheduler_round_seconds_sum") / max(1.0, rounds),
        "round_p50_ms": 1e3 * (quantile(buckets, 0.5) or 0.0),
        "round_p99_ms": 1e3 * (quantile(buckets, 0.99) or 0.0),
        "in_target": dict(buckets)[TARGET_S] / max(1.0, rounds),
        "rounds_per_s": rounds / took_s,
        "rounds_share": since("scheduler_round_seconds_sum") / took_s,
    }


def _cells(figures: Figures) -> Sequence[str]:
    return (
        f"{figures['round_ms']:.2f}",
        f"{figures['round_p50_ms']:.1f}",
        f"{figures['round_p99_ms']:.1f}",
        f"{figures['in_target']:.2f}",
        f"{figures['rounds_per_s']:.1f}",
        f"{figures['rounds_share']:.2f}",
        f"{figures['running']:,.0f}",
        f"{figures['waiting']:,.0f}",
        f"{figures['tokens_per_s']:,.0f}",
    )


if __name__ == "__main__":
    main()

"""`python -m benchmarks.kv`: residency policies when memory holds a quarter of the load.

The whole system on the demo model, with known answer lengths (`predictor.model=max`, and every
answer has `max_tokens`), one Poisson load of short and long answers, and a KV cache for a quarter
of its tokens. Each mode has a fresh server and the same requests, policy `alise`: swap to host
memory, the same in INT8, recompute, defer (no eviction), and cost (swap or recompute, whichever is
cheaper); and policy `fcfs`, without forecasts. Rounds alternate, so that a machine that slows down
slows all of them. Then the time to first token of a long prompt with a cached prefix, relative to
one without.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness.clients import GrpcClient
from benchmarks.harness.offered_load import Asked, Seen, bimodal, offer
from benchmarks.harness.report import Figure, Options, figure, options, show, write
from benchmarks.harness.system import counted, system
from foretoken.running.ports import free_port

MODES: dict[str, tuple[str, ...]] = {
    "swap": ("scheduler.policy=alise", "preset.residency=swap"),
    "swap_int8": ("scheduler.policy=alise", "preset.residency=swap", "worker.swap_dtype=int8"),
    "recompute": ("scheduler.policy=alise", "preset.residency=recompute"),
    "defer": ("scheduler.policy=alise", "preset.residency=defer"),
    "cost": ("scheduler.policy=alise", "preset.residency=cost"),
    "fcfs": ("scheduler.policy=fcfs",),
}
SHARE = 4  # the KV cache holds this fraction of the load
RATE = 12.0  # requests per second: above the capacity of two cores, so that memory fills
PREFIX_TOKENS, TAIL_TOKENS = 1_024, 32
COUNTED = ("worker_evictions", "kv_offloads", "kv_uploads", "kv_dropped", "kv_host_full")
Figures = dict[str, float]


def figures_of(seen: Sequence[Seen], elapsed_s: float) -> Figures:
    gaps = np.concatenate([s.gaps_s for s in seen])
    return {
        "normalised_latency_s": float(np.mean([s.normalised_latency_s for s in seen])),
        "p99_tbt_s": float(np.quantile(gaps, 0.99)),
        "tok_s": sum(len(s.token_s) for s in seen) / elapsed_s,
    }


def counters(port: int) -> Figures:
    """The worker's counters."""
    found = counted(f"http://127.0.0.1:{port}")
    return {name: found[f"{name}_total"] for name in COUNTED}


async def measure_mode(mode: str, load: Sequence[Asked]) -> Figures:
    """One fresh server under the whole load."""
    kv_tokens = sum(asked.footprint_tokens for asked in load) // SHARE
    port = free_port()
    choices = (*MODES[mode], "predictor.model=max", f"worker.metrics_port={port}")
    settings = [word for choice in choices for word in ("--set", choice)]
    arguments = ["--kv-tokens", str(kv_tokens), *settings]
    with system(*arguments) as (_, grpc_address):
        client = GrpcClient(grpc_address)
        await client.token_times_s(load[0].prompt, 8)  # warm: lazy imports, first pages
        seen, elapsed_s = await offer(load, client.token_times_s)
        await client.close()
        return figures_of(seen, elapsed_s) | counters(port)


async def prefix_ratio(repeats: int) -> Figure:
    """TTFT with a known prefix over TTFT with none, pair by pair."""
    rng = np.random.default_rng(1)
    ratios = []
    with system("--kv-tokens", "32768") as (_, grpc_address):
        client = GrpcClient(grpc_address)
        for _ in range(repeats + 1):
            prefix = rng.integers(40, 240, PREFIX_TOKENS).tolist()
            first, second = (prefix + rng.integers(40, 240, TAIL_TOKENS).tolist() for _ in "ab")
            unknown_s = await client.ttft_s(first)
            ratios.append(await client.ttft_s(second) / unknown_s)
        await client.close()
    return figure(ratios[1:])  # the first pair pays for lazy imports


async def measure(settings: Options) -> tuple[dict[str, dict[str, Figure]], Figure]:
    requests, repeats = (12, 1) if settings.quick else (96, 3)
    taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    load = bimodal(requests, RATE, seed=0)
    for _ in range(repeats):
        for mode in MODES:
            for name, value in (await measure_mode(mode, load)).items():
                taken[mode][name].append(value)
    modes = {mode: {k: figure(v) for k, v in found.items()} for mode, found in taken.items()}
    return modes, await prefix_ratio(3 if settings.quick else 15)


def main() -> None:
    settings = options(__doc__ or "")
    modes, ratio = asyncio.run(measure(settings))
    names = list(next(iter(modes.values())))
    show(
        f"memory for 1/{SHARE} of the load, {RATE:g} requests/s: median (lowest–highest)",
        ["", *names[:3]],
        [[mode, *(found[name] for name in names[:3])] for mode, found in modes.items()],
    )
    show(
        "counted by the worker: median",
        ["", *COUNTED],
        [[mode, *(f"{found[n].median:g}" for n in COUNTED)] for mode, found in modes.items()],
    )
    show("", ["", "median"], [["TTFT with a known prefix / without", ratio]])
    medians: dict[str, Any] = {
        mode: {name: f.median for name, f in found.items()} for mode, found in modes.items()
    }
    repeats = {m: {n: f.values for n, f in found.items()} for m, found in modes.items()}
    write(
        settings.json,
        {
            **medians,
            "prefix_hit_ttft_ratio": ratio.median,
            "repeats": {**repeats, "prefix_hit_ttft_ratio": ratio.values},
        },
    )


if __name__ == "__main__":
    main()

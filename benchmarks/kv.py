"""Residency policies when the KV cache holds a quarter of the load.

    python -m benchmarks.kv [--json FILE] [--quick]

The whole system on the demo model with known answer lengths (`predictor.model=max`, and every
answer has `max_tokens`). The load is a Poisson process of short and long answers. Every mode gets a
new server and the same requests. Modes of policy `alise`: swap to host memory, swap in INT8,
recompute, defer (no eviction), and cost (swap or recompute, whichever is cheaper). The last mode is
policy `fcfs`, without forecasts. Rounds alternate between the modes, so that a machine that slows
down slows all of them. At the end the benchmark measures the time to first token of a long prompt
with a cached prefix, relative to one without.
"""

import asyncio
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.clients import GrpcClient
from benchmarks.harness.report import Measurements, parser, show, write
from benchmarks.harness.system import foretoken_system, read_metrics, settings
from benchmarks.harness.throughput import WORD_IDS, make_prompts
from foretoken.running.ports import free_port

MODES: dict[str, tuple[str, ...]] = {
    "swap": ("scheduler.policy=alise", "preset.residency=swap"),
    "swap_int8": ("scheduler.policy=alise", "preset.residency=swap", "worker.swap_dtype=int8"),
    "recompute": ("scheduler.policy=alise", "preset.residency=recompute"),
    "defer": ("scheduler.policy=alise", "preset.residency=defer"),
    "cost": ("scheduler.policy=alise", "preset.residency=cost"),
    "fcfs": ("scheduler.policy=fcfs",),
}
KV_FRACTION = 4  # the KV cache holds 1/KV_FRACTION of the load
RATE = 12.0  # requests per second: above the capacity of two cores, so that memory fills
PREFIX_TOKENS, TAIL_TOKENS = 1_024, 32
LATENCIES = ("normalised_latency_s", "p99_tbt_s", "tok_s")
COUNTERS = ("worker_evictions", "kv_offloads", "kv_uploads", "kv_dropped", "kv_host_full")
PREFIX_RATIO = "prefix_hit_ttft_ratio"


@dataclass(frozen=True)
class TimedRequest:
    """One request of the load, sent `after_s` seconds from the start."""

    after_s: float
    prompt: list[int]
    output_tokens: int


def bimodal_load(requests: int, seed: int) -> list[TimedRequest]:
    """Returns Poisson arrivals of RATE per second; a third of the answers is long."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / RATE, requests))
    long = rng.random(requests) < 1 / 3
    outputs = np.where(long, rng.integers(512, 1_024, requests), rng.integers(16, 64, requests))
    prompts = rng.integers(64, 256, requests)
    return [
        TimedRequest(
            float(after_s),
            rng.integers(WORD_IDS.start, WORD_IDS.stop, int(prompt)).tolist(),
            int(output),
        )
        for after_s, prompt, output in zip(arrivals_s, prompts, outputs, strict=True)
    ]


async def send_load(client: GrpcClient, load: Sequence[TimedRequest]) -> dict[str, float]:
    """Sends each request at its time and returns the figures of LATENCIES.

    `normalised_latency_s` is the end-to-end time per token (ALISE, Zhao et al., 2024). Tokens of
    one message have a gap of 0.
    """
    began_s = time.perf_counter()

    async def send(request: TimedRequest) -> list[float]:
        await asyncio.sleep(began_s + request.after_s - time.perf_counter())
        sent_s = time.perf_counter()
        times_s = await client.token_times_s(request.prompt, request.output_tokens)
        if len(times_s) != request.output_tokens:
            raise RuntimeError(f"{len(times_s)} of {request.output_tokens} tokens arrived")
        return [at_s - sent_s for at_s in times_s]

    answers = await asyncio.gather(*(send(request) for request in load))
    elapsed_s = time.perf_counter() - began_s
    figures = (
        np.mean([answer[-1] / len(answer) for answer in answers]),
        np.quantile(np.concatenate([np.diff(answer) for answer in answers]), 0.99),
        sum(map(len, answers)) / elapsed_s,
    )
    return dict(zip(LATENCIES, map(float, figures), strict=True))


async def measure_mode(mode: str, load: Sequence[TimedRequest]) -> dict[str, float]:
    """Sends the whole load to a new server."""
    kv_tokens = sum(len(r.prompt) + r.output_tokens for r in load) // KV_FRACTION
    port = free_port()
    choices = (*MODES[mode], "predictor.model=max", f"worker.metrics_port={port}")
    with foretoken_system("--kv-tokens", str(kv_tokens), *settings(*choices)) as system:
        client = GrpcClient(system.grpc)
        await client.token_times_s(load[0].prompt, 8)  # warm-up: lazy imports, first page faults
        figures = await send_load(client, load)
        await client.close()
        metrics = read_metrics(f"http://127.0.0.1:{port}")
        return figures | {name: metrics[f"{name}_total"] for name in COUNTERS}


async def measure_prefix_ratio(repeats: int, measured: Measurements) -> None:
    """Adds the TTFT with a cached prefix relative to the TTFT without, pair by pair."""
    with foretoken_system("--kv-tokens", "32768") as system:
        client = GrpcClient(system.grpc)
        for number in range(repeats + 1):
            [prefix] = make_prompts(1, PREFIX_TOKENS, seed=2 * number)
            first, second = make_prompts(2, TAIL_TOKENS, seed=2 * number + 1)
            uncached_s = await client.ttft_s(prefix + first)
            ratio = await client.ttft_s(prefix + second) / uncached_s
            if number:  # the first pair includes lazy imports
                measured.add((PREFIX_RATIO,), ratio)
        await client.close()


async def measure(options: Namespace) -> Measurements:
    requests, rounds, pairs = (12, 1, 3) if options.quick else (96, 3, 15)
    measured = Measurements()
    load = bimodal_load(requests, seed=0)
    for _ in range(rounds):
        for mode in MODES:
            for name, value in (await measure_mode(mode, load)).items():
                measured.add((mode, name), value)
    await measure_prefix_ratio(pairs, measured)
    return measured


def main() -> None:
    options = parser(__doc__).parse_args()
    measured = asyncio.run(measure(options))
    show(
        f"memory for 1/{KV_FRACTION} of the load, {RATE:g} requests/s: median (lowest–highest)",
        ["", *LATENCIES],
        [[mode, *(measured.figure(mode, name) for name in LATENCIES)] for mode in MODES],
    )
    show(
        "counters of the worker: median",
        ["", *COUNTERS],
        [[m, *(f"{measured.figure(m, name).median:g}" for name in COUNTERS)] for m in MODES],
    )
    ratio = measured.figure(PREFIX_RATIO)
    show("", ["", "median"], [["TTFT with a cached prefix / without", ratio]])
    write(options.json, measured.medians() | {"repeats": measured.repeats()})


if __name__ == "__main__":
    main()

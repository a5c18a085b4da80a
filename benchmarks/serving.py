"""`python -m benchmarks.serving`: the overhead of serving over the bare engine, and a peer.

One run on one machine with one model (models/demo, fp32, greedy, end of sequence ignored): tokens
per second of (a) the bare engine loop, (b) the whole system through gRPC, (c) through HTTP with
server-sent events, (d) transformers' continuous batching, by number of streams; the time to first
token that everything around the engine adds when idle; and the policy time of a planning round at
64 running and 1,000 queued. Rounds alternate (a) to (d), so that a machine that slows down slows
all of them.
"""

import asyncio
from collections import defaultdict

import torch

from benchmarks.engine.bare_engine import BareEngine
from benchmarks.harness.clients import GrpcClient, HttpClient, tokens_per_s
from benchmarks.harness.peers import Transformers
from benchmarks.harness.report import Figure, Options, figure, options, show, write
from benchmarks.harness.rounds import measure as measure_rounds
from benchmarks.harness.system import system
from foretoken.running.options import demo_model

KV_TOKENS = 65_536
PROMPT_TOKENS = 32
POLICIES = ("fcfs", "conservative", "past-future")
KINDS = ("engine_tok_s", "grpc_tok_s", "http_tok_s", "transformers_tok_s")


def prompts(count: int) -> list[list[int]]:
    """Distinct prompts of ordinary tokens."""
    return [[40 + (7 * i + 3 * j) % 200 for j in range(PROMPT_TOKENS)] for i in range(count)]


async def measure(settings: Options) -> dict[str, dict[int, Figure]]:
    """Tokens per second of every system by number of streams, and TTFTs under "engine"/"grpc"."""
    streams = (1, 8) if settings.quick else (1, 8, 32, 64)
    output_tokens = 32 if settings.quick else 256
    repeats = 1 if settings.quick else 5
    engine = BareEngine(demo_model(), KV_TOKENS)
    peer = Transformers(demo_model(), KV_TOKENS, max(streams))
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    with system("--kv-tokens", str(KV_TOKENS)) as (http_url, grpc_address):
        grpc, http = GrpcClient(grpc_address), HttpClient(http_url)
        await tokens_per_s(grpc.ask, prompts(max(streams)), 16)  # warm: lazy imports, first pages
        engine.tokens_per_s(prompts(max(streams)), 16)
        peer.tokens_per_s(prompts(2), 16)
        for _ in range(repeats):
            for n in streams:
                some = prompts(n)
                taken["engine_tok_s", n].append(engine.tokens_per_s(some, output_tokens))
                taken["grpc_tok_s", n].append(await tokens_per_s(grpc.ask, some, output_tokens))
                taken["http_tok_s", n].append(await tokens_per_s(http.ask, some, output_tokens))
                taken["transformers_tok_s", n].append(peer.tokens_per_s(some, output_tokens))
        for prompt in prompts(10 if settings.quick else 100):
            taken["engine", 0].append(engine.ttft_s(prompt))
            taken["grpc", 0].append(await grpc.ttft_s(prompt))
        await grpc.close()
    figures: dict[str, dict[int, Figure]] = defaultdict(dict)
    for (kind, n), values in taken.items():
        figures[kind][n] = figure(values)
    return figures


def main() -> None:
    settings = options(__doc__ or "")
    torch.set_num_threads(1)  # as the worker chooses for so small a model
    rounds = {p: figure(measure_rounds(p, 64, 1_000, 100)[1].rounds_ms) for p in POLICIES}
    figures = asyncio.run(measure(settings))
    engine, grpc = figures["engine"][0], figures["grpc"][0]
    added_ms = (grpc.median - engine.median) * 1e3
    streams = sorted(figures["engine_tok_s"])
    show(
        "tokens/s by number of streams: median (lowest–highest)",
        ["", *map(str, streams)],
        [[kind, *(figures[kind][n] for n in streams)] for kind in KINDS],
    )
    most = streams[-1]
    at = {kind: figures[kind][most].median for kind in KINDS}
    show(
        "",
        ["", "median"],
        [
            [f"gRPC over bare engine, {most} streams", f"{at[KINDS[1]] / at[KINDS[0]]:.2f}"],
            [f"engine over transformers, {most} streams", f"{at[KINDS[0]] / at[KINDS[3]]:.2f}"],
            ["TTFT bare engine, ms", f"{engine.median * 1e3:.2f}"],
            ["TTFT through gRPC, ms", f"{grpc.median * 1e3:.2f}"],
            ["added TTFT at idle, ms", f"{added_ms:.2f}"],
            *([f"planning round, {name}, ms", f] for name, f in rounds.items()),
        ],
    )
    by_streams = {k: {str(n): f.median for n, f in figures[k].items()} for k in KINDS}
    spread = {k: {str(n): f.values for n, f in figures[k].items()} for k in KINDS}
    write(
        settings.json,
        {
            **by_streams,
            "added_ttft_ms": added_ms,
            "plan_round_ms": max(f.median for f in rounds.values()),
            "plan_round_ms_by_policy": {name: f.median for name, f in rounds.items()},
            "repeats": spread,
        },
    )


if __name__ == "__main__":
    main()

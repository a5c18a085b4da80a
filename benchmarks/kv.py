"""Residency policies when the KV cache holds a quarter of the load.

    python -m benchmarks.kv [--factor 1.6] [--dtype bfloat16] [--json FILE] [--quick]

The whole system serves the padded demo model (`models.padded`) through HTTP, so
that the engine is the bottleneck. A third of the answers is long, and all lengths are known: every
request generates exactly its `max_tokens`, and `predictor.model=max` forecasts them. The benchmark
first measures the capacity of `fcfs`, as `benchmarks.overload` does. Then every mode gets a new
server and, in each round, the same Poisson arrivals at `--factor` of the capacity. Modes of policy
`alise`: swap to host memory, swap in INT8, recompute, defer (paused requests keep their KV on the
device; only lack of memory evicts), and cost (swap or recompute, whichever is cheaper). The last
mode is policy `fcfs`. Rounds alternate between the modes, in reverse order in every other round, so
that a machine that slows down slows all of them.

The figures are those of `benchmarks.overload`, beside `gap_p99_s`, the p99 of the longest gap
between two arrivals of an answer's text, and the worker's counters. A row is reported as not valid
if the engine was idle for more than a tenth of the time in which requests waited. At the end the
benchmark measures the time to first token of a long prompt with a cached prefix, relative to one
without.
"""

import sys
from argparse import Namespace
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import uvloop

from benchmarks.harness.clients import GrpcClient
from benchmarks.harness.report import Measurements, alternating, parser, show, write
from benchmarks.harness.system import foretoken_system, read_metrics, settings
from benchmarks.harness.throughput import make_prompts
from benchmarks.overload.busy import describe_invalid
from benchmarks.overload.demo_load import burst_load, draw_bodies
from benchmarks.overload.figures import Figures, short, show_busy, show_factor
from benchmarks.overload.measuring import measure_capacity, measure_load
from benchmarks.overload.open_loop import send_load
from benchmarks.overload.prompt_pool import PromptPool
from benchmarks.overload.systems import DTYPES, ServedModel, padded_demo_model
from models.words import WORDS

MODES: dict[str, tuple[str, ...]] = {
    "swap": ("scheduler.policy=alise", "preset.residency=swap"),
    "swap_int8": ("scheduler.policy=alise", "preset.residency=swap", "worker.swap_dtype=int8"),
    "recompute": ("scheduler.policy=alise", "preset.residency=recompute"),
    "defer": ("scheduler.policy=alise", "preset.residency=defer"),
    "cost": ("scheduler.policy=alise", "preset.residency=cost"),
    "fcfs": ("scheduler.policy=fcfs",),
}
KV_FRACTION = 4  # the KV cache holds 1/KV_FRACTION of the load
POOL = 2_000  # requests to draw from, so that a load repeats few prompts of the one before
TEMPLATE_TOKENS = 3  # of the chat template around one turn
WARM_UP = 8  # short chats that a new server answers first and that do not count
TIMEOUT_S = 600.0  # a load that takes longer after its last arrival is an error
PREFIX_TOKENS, TAIL_TOKENS = 1_024, 32
COUNTERS = ("worker_evictions", "kv_offloads", "kv_uploads", "kv_dropped", "kv_host_full")
PREFIX_RATIO = "prefix_hit_ttft_ratio"


class FixedLengths(PromptPool):
    """Prompts of words, one token each, with answers of exactly the drawn lengths."""

    def fields(self, i: int) -> dict[str, object]:
        """The end of an answer is ignored, and visible: every token is an arrival of text."""
        exact = {"max_tokens": self.lengths[i], "ignore_eos": True, "skip_special_tokens": False}
        return super().fields(i) | exact

    @property
    def mean_kv_tokens(self) -> float:
        """Of a request at its end."""
        words = [len(str(turn["content"]).split()) for [turn] in self.chats]
        return float(np.mean(words)) + TEMPLATE_TOKENS + self.mean_tokens


def bimodal_pool(seed: int) -> FixedLengths:
    """Returns prompts of 64 to 255 words; a third of the answers is long."""
    rng = np.random.default_rng(seed)
    long = rng.random(POOL) < 1 / 3
    lengths = np.where(long, rng.integers(512, 1_024, POOL), rng.integers(16, 64, POOL))
    prompts = [" ".join(rng.choice(WORDS, words)) for words in rng.integers(64, 256, POOL)]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return FixedLengths(chats, lengths.tolist(), int(lengths.max()))


@dataclass(frozen=True)
class ShortOfMemory(ServedModel):
    """A model with KV memory for 1/KV_FRACTION of `requests` at once."""

    requests: int = 0

    @cached_property
    def pool(self) -> FixedLengths:
        return bimodal_pool(seed=0)

    @property
    def kv_tokens(self) -> int:
        return int(self.requests * self.pool.mean_kv_tokens) // KV_FRACTION


async def measure_mode(mode: str, model: ShortOfMemory, rate: float, seed: int) -> Figures:
    """Sends one load to a new server. Raises RuntimeError if a request fails."""
    choices = (*MODES[mode], "predictor.model=max", "log.path=")
    with foretoken_system(*model.arguments, *settings(*choices)) as system:
        await send_load(system.http, burst_load(draw_bodies(WARM_UP, seed=1)), TIMEOUT_S)
        before = read_metrics(system.http)
        bodies = model.pool.draw_bodies(model.requests, seed)
        figures, errors = await measure_load(system, model, bodies, rate, TIMEOUT_S, seed)
        if errors:
            raise RuntimeError(f"requests of {mode} failed: {dict(errors)}")
        after = read_metrics(system.http)
        names = {name: f"{name}_total" for name in COUNTERS}
        return figures | {name: after[total] - before[total] for name, total in names.items()}


async def measure_prefix_ratio(model: ServedModel, repeats: int, measured: Measurements) -> None:
    """Adds the TTFT with a cached prefix relative to the TTFT without, pair by pair."""
    choices = ("--model", model.folder, "--dtype", model.dtype, "--kv-tokens", "32768")
    with foretoken_system(*choices) as system:
        client = GrpcClient(system.grpc)
        for number in range(repeats + 1):
            [prefix] = make_prompts(1, PREFIX_TOKENS, seed=2 * number)
            first, second = make_prompts(2, TAIL_TOKENS, seed=2 * number + 1)
            uncached_s = await client.ttft_s(prefix + first)
            ratio = await client.ttft_s(prefix + second) / uncached_s
            if number:  # the first pair includes lazy imports
                measured.add((PREFIX_RATIO,), ratio)
        await client.close()


async def measure(options: Namespace, folder: str) -> tuple[Measurements, Figures]:
    """Returns the figures by mode, factor and name, and the capacity."""
    requests, rounds, pairs = (24, 1, 3) if options.quick else (96, 3, 15)
    model = ShortOfMemory(folder, options.dtype, requests=requests)
    capacity = await measure_capacity(model, requests, TIMEOUT_S)
    measured = Measurements()
    for number, modes in alternating(list(MODES), rounds):
        for mode in modes:
            print(f"round {number + 1} of {rounds}: {mode}", file=sys.stderr, flush=True)
            rate = options.factor * capacity["requests_s"]
            for name, value in (await measure_mode(mode, model, rate, 10 + number)).items():
                measured.add((mode, f"{options.factor:g}", name), value)
    await measure_prefix_ratio(model, pairs, measured)
    return measured, capacity | {"kv_tokens": model.kv_tokens}


def main() -> None:
    options = _options()
    with padded_demo_model() as folder:
        measured, capacity = uvloop.run(measure(options, folder))
    factor = f"{options.factor:g}"
    print(
        f"padded demo model, {options.dtype}: {capacity['requests_s']:.1f} requests/s of "
        f"{capacity['mean_tokens']:.0f} tokens, {capacity['tok_s']:,.0f} tokens/s; "
        f"{capacity['kv_tokens']:,} KV tokens, 1/{KV_FRACTION} of the load; lengths are known"
    )
    show_factor(factor, list(MODES), measured)
    show_busy(factor, list(MODES), measured)
    columns = ("gap_p99_s", *COUNTERS)
    show(
        "p99 of the longest gaps, and counters of the worker: median",
        ["", *columns],
        [[m, *(short(measured.figure(m, factor, name).median) for name in columns)] for m in MODES],
    )
    for mode in MODES:
        if invalid := describe_invalid(mode, factor, measured.values[mode, factor, "engine_idle"]):
            print(invalid)
    ratio = measured.figure(PREFIX_RATIO)
    show("", ["", "median"], [["TTFT with a cached prefix / without", ratio]])
    extra = {"dtype": options.dtype, "capacity": capacity, "repeats": measured.repeats()}
    write(options.json, measured.medians() | extra)


def _options() -> Namespace:
    options = parser(__doc__)
    options.add_argument("--factor", type=float, default=1.6, help="of the capacity; default: 1.6")
    options.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="default: float32")
    given = options.parse_args()
    if not 0 < given.factor < np.inf:
        raise SystemExit(f"--factor takes a number above 0, got {given.factor:g}")
    return given


if __name__ == "__main__":
    main()

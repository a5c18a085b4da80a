"""Figures of one load, and tables over all systems."""

import re
from collections import Counter
from collections.abc import Sequence
from math import isnan
from statistics import median

import numpy as np

from benchmarks.harness.report import Measurements, show
from benchmarks.overload.open_loop import REFUSED, Answer
from benchmarks.overload.systems import PEER, knows_lengths
from gateway.config import GatewayConfig

RAMP_SHARE = 0.2  # of the arrivals, until the number of running requests is stable
SLA = GatewayConfig().sla_classes["standard"]
MEDIANS = (
    "tok_s",
    "norm_latency_s",
    "norm_latency_p99_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "e2e_p99_s",
    "goodput_share",
)
BUSY = ("engine_busy", "front_cpu", "client_cpu", "engine_idle", "kv_used", "engine_full")
COUNTS = ("errors", "refused", "resubmitted")
REQUEST_ID = re.compile(r"\b(?=[\w-]*\d)[\w-]{4,}\b")

Figures = dict[str, float]


def tokens_per_s(answers: Sequence[Answer], from_s: float, to_s: float) -> float:
    """Returns the rate between two times. The tokens of an answer are spread evenly between its
    first and its last token."""
    complete = [a for a in answers if not a.problem]
    first, last, tokens = (
        np.array([getattr(a, name) for a in complete]) for name in ("first_s", "last_s", "tokens")
    )
    inside_s = np.clip(np.minimum(last, to_s) - np.maximum(first, from_s), 0, None)
    instant = (last == first) & (from_s <= first) & (first <= to_s)
    share = np.where(instant, 1.0, inside_s / np.maximum(last - first, 1e-9))
    return float((tokens * share).sum() / (to_s - from_s))


def figures_of(answers: Sequence[Answer], arrivals_s: float) -> Figures:
    """Returns the figures of a load in which arrivals last `arrivals_s`. Times without answers are
    NaN."""
    complete = [a for a in answers if not a.problem]
    ttft_s = [a.ttft_s for a in complete] or [np.nan]
    latency_s = [a.normalised_latency_s for a in complete] or [np.nan]
    whole_s = [a.last_s - a.due_s for a in complete] or [np.nan]
    refused = sum(a.problem == REFUSED for a in answers)
    within_sla = sum(
        a.ttft_s <= SLA.ttft_s and a.tpot_s <= SLA.tpot_s and a.gap_s <= SLA.mtpot_s
        for a in complete
    )
    return {
        "tok_s": tokens_per_s(answers, RAMP_SHARE * arrivals_s, arrivals_s),
        "norm_latency_s": float(np.mean(latency_s)),
        "norm_latency_p99_s": float(np.quantile(latency_s, 0.99)),
        "ttft_p50_s": float(np.quantile(ttft_s, 0.5)),
        "ttft_p99_s": float(np.quantile(ttft_s, 0.99)),
        "e2e_p99_s": float(np.quantile(whole_s, 0.99)),
        "gap_p99_s": float(np.quantile([a.gap_s for a in complete] or [np.nan], 0.99)),
        "goodput_share": within_sla / len(answers),
        "errors": float(len(answers) - len(complete) - refused),
        "refused": float(refused),
    }


def count_errors(answers: Sequence[Answer]) -> Counter[str]:
    """Counts errors by message, without request ids."""
    problems = (a.problem for a in answers if a.problem not in ("", REFUSED))
    return Counter(REQUEST_ID.sub("…", problem) for problem in problems)


def show_factor(factor: str, names: Sequence[str], measured: Measurements) -> None:
    """Prints the table of one load factor, the lowest latency first."""

    def values(name: str, figure: str) -> list[float]:
        return measured.values[name, factor, figure]

    def latency_s(name: str) -> tuple[bool, float]:
        value = median(values(name, "norm_latency_s"))
        return isnan(value), value

    show(
        f"{factor} × capacity: median and, below, lowest–highest; counts over all rounds; "
        "* with known lengths",
        ["", *MEDIANS, "/".join(COUNTS)],
        [
            [
                f"{name}{'*' if knows_lengths(name) else ''}",
                *(_cell(values(name, figure)) for figure in MEDIANS),
                "/".join(f"{sum(values(name, figure)):g}" for figure in COUNTS),
            ]
            for name in sorted(names, key=latency_s)
        ],
        width=150,
    )


def show_busy(factor: str, names: Sequence[str], measured: Measurements) -> None:
    """Prints how busy the parts of each system were at one load factor."""
    show(
        f"{factor} × capacity: shares of the time; nan: unknown, or no request waited",
        ["", *BUSY],
        [
            [name, *(_cell(measured.values[name, factor, figure]) for figure in BUSY)]
            for name in names
        ],
    )


def best_systems(factor: str, medians: dict[str, dict[str, Figures]]) -> str:
    """Returns a sentence with the systems of the lowest mean latency per token and of the best
    goodput. Oracles are listed separately; the peer is excluded."""
    figures = {name: by[factor] for name, by in medians.items() if name != PEER}
    oracles = {name: f for name, f in figures.items() if knows_lengths(name)}
    others = {name: f for name, f in figures.items() if name not in oracles}
    if not others:
        return f"{factor} ×: no system without an oracle was measured"
    parts = [
        f"{factor} ×: best of {len(others)} in latency {_best(others, 'norm_latency_s', 1, 3)}",
        f"in goodput {_best(others, 'goodput_share', -1, 3)}",
    ]
    if oracles:
        parts.append(f"oracles: latency {_best(oracles, 'norm_latency_s', 1, 1)}")
        parts.append(f"goodput {_best(oracles, 'goodput_share', -1, 1)}")
    return "; ".join(parts)


def _best(figures: dict[str, Figures], key: str, sign: int, limit: int) -> str:
    """The best first; systems without the figure last."""
    ranked = sorted(
        figures, key=lambda name: (isnan(figures[name][key]), sign * figures[name][key])
    )
    return ", ".join(f"{name} {short(figures[name][key])}" for name in ranked[:limit])


def _cell(values: Sequence[float]) -> str:
    spread = f"\n{short(min(values))}–{short(max(values))}" if len(values) > 1 else ""
    return short(median(values)) + spread


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

"""Tables that compare runs: all figures of their summaries, with the best ones marked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isnan

from simulator.report.summary import Summary

Rows = Sequence[tuple[Mapping[str, float], Summary]]


class Better(IntEnum):
    """Which values are better; NEITHER for figures that only describe a run."""

    LESS = -1
    NEITHER = 0
    MORE = 1


@dataclass(frozen=True, slots=True)
class Column:
    key: str  # of Summary
    title: str
    better: Better
    show: Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    best: bool = False


@dataclass(frozen=True, slots=True)
class ComparisonTable:
    """`rows` have a cell for each of `titles`; the first `names` of them name the run."""

    title: str
    titles: tuple[str, ...]
    names: int
    rows: tuple[tuple[Cell, ...], ...]


def three_digits(value: float) -> str:
    """At least three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def whole(value: float) -> str:
    return f"{value:,.0f}"


def percent(value: float) -> str:
    return f"{value:.1%}"


def _latency(key: str, title: str, *statistics: str) -> tuple[Column, ...]:
    return tuple(
        Column(f"{key}_{statistic}_s", f"{title} {statistic}", Better.LESS, three_digits)
        for statistic in statistics
    )


TABLES: dict[str, tuple[Column, ...]] = {
    "Latency of finished requests, seconds": (
        *_latency("ttft", "TTFT", "mean", "p99"),
        *_latency("tpot", "TPOT", "mean", "p99"),
        *_latency("token_latency", "per output token", "mean", "p99"),
        *_latency("e2e", "end to end", "mean", "p99"),
        *_latency("waiting", "longest wait", "mean", "p99"),
        *_latency("gap", "longest gap", "p99"),
    ),
    "Goodput and throughput": (
        Column("goodput", "goodput", Better.MORE, percent),
        Column("goodput_tokens_per_s", "goodput, tokens/s", Better.MORE, whole),
        Column("output_tokens_per_s", "output tokens/s", Better.MORE, whole),
        Column("requests_per_s", "requests/s", Better.MORE, three_digits),
        Column("makespan_s", "makespan, s", Better.LESS, three_digits),
        Column("requests", "requests", Better.NEITHER, whole),
        Column("finished", "finished", Better.MORE, whole),
        Column("rejected", "rejected", Better.LESS, whole),
    ),
    "Scheduler and workers": (
        Column("preemptions", "preemptions", Better.NEITHER, whole),
        Column("evictions", "evictions", Better.LESS, whole),
        Column("rounds", "rounds", Better.NEITHER, whole),
        Column("busy_share", "time computing", Better.NEITHER, percent),
        Column("kv_share", "mean KV in use", Better.NEITHER, percent),
        Column("kv_peak_share", "most KV in use", Better.NEITHER, percent),
        Column("prefix_hit_share", "prompt tokens cached", Better.NEITHER, percent),
        Column("rows", "mean decode rows", Better.NEITHER, three_digits),
    ),
}


def compare(rows: Rows) -> list[ComparisonTable]:
    """The tables. The best figures among runs with equal swept values are marked, unless all of
    them are shown equal."""
    keys = tuple(rows[0][0]) if rows else ()
    names = [
        (*(Cell(f"{value:g}") for value in varied.values()), Cell(summary.preset))
        for varied, summary in rows
    ]
    return [
        ComparisonTable(
            title,
            (*keys, "preset", *(column.title for column in columns)),
            len(keys) + 1,
            tuple(
                (*name, *cells)
                for name, *cells in zip(
                    names, *(_cells(column, rows) for column in columns), strict=True
                )
            ),
        )
        for title, columns in TABLES.items()
    ]


def _cells(column: Column, rows: Rows) -> list[Cell]:
    values = [float(getattr(summary, column.key)) for _, summary in rows]
    texts = ["–" if isnan(value) else column.show(value) for value in values]
    cells = []
    for (keys, _), text in zip(rows, texts, strict=True):
        same = [at for at, (others, _) in enumerate(rows) if others == keys]
        best = _best({texts[at]: values[at] for at in same}, column.better)
        cells.append(Cell(text, text == best))
    return cells


def _best(values: Mapping[str, float], better: Better) -> str | None:
    """The text of the best value; None if there is no choice."""
    known = {text: value for text, value in values.items() if not isnan(value)}
    if better is Better.NEITHER or len(known) < 2:
        return None
    return max(known, key=lambda text: better * known[text])

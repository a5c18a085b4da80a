"""The report of a twin: a table, and rows of JSON."""

from collections.abc import Iterator
from math import isfinite

from rich.table import Table

from simulator.rows import Row
from simulator.twin.comparison import Comparison, Figure

PARTS = ("mean", "median", "p99")  # of a latency
NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}


def twin_table(comparison: Comparison, title: str) -> Table:
    """Returns a table with a line per figure: measured, simulated and error, then the errors of
    single requests."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("", "measured", "simulated", "error", "per request: median", "p99"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, latency in comparison.latencies.items():
        for part in PARTS:
            errors = (latency.request_error_p50, latency.request_error_p99)
            shown = [_percent(error, ".1%") for error in errors] if part == "median" else []
            cells = _cells(getattr(latency, part), 1e3, "ms")
            table.add_row(f"{NAMES[name]}, {part}", *cells, *shown)
    table.add_row("makespan", *_cells(comparison.makespan_s, 1.0, "s"))
    table.add_row("output tokens/s", *_cells(comparison.tokens_per_s, 1.0, ""))
    table.add_row("step, mean", *_cells(comparison.step_s, 1e3, "ms"))
    goodput = comparison.goodput
    points = f"{100 * (goodput.simulated - goodput.measured):+.1f} points"
    table.add_row("goodput", f"{goodput.measured:.1%}", f"{goodput.simulated:.1%}", points)
    return table


def twin_rows(comparison: Comparison) -> list[Row]:
    """Returns a row per figure; None for an error that is not defined."""
    return list(_rows(comparison))


def _rows(comparison: Comparison) -> Iterator[Row]:
    for name, latency in comparison.latencies.items():
        for part in PARTS:
            yield _row(f"{name}_{part}", getattr(latency, part))
        yield {"figure": f"{name}_request_error_p50", "error": _known(latency.request_error_p50)}
        yield {"figure": f"{name}_request_error_p99", "error": _known(latency.request_error_p99)}
    for name in ("makespan_s", "tokens_per_s", "step_s", "goodput"):
        yield _row(name, getattr(comparison, name))


def _row(name: str, figure: Figure) -> Row:
    return {
        "figure": name,
        "measured": figure.measured,
        "simulated": figure.simulated,
        "error": _known(figure.error),
    }


def _cells(figure: Figure, scale: float, unit: str) -> tuple[str, str, str]:
    values = (scale * figure.measured, scale * figure.simulated)
    shown = (f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}" for value in values)
    measured, simulated = (f"{value} {unit}".rstrip() for value in shown)
    return measured, simulated, _percent(figure.error, "+.1%")


def _percent(value: float, style: str) -> str:
    return format(value, style) if isfinite(value) else "–"


def _known(value: float) -> float | None:
    return value if isfinite(value) else None

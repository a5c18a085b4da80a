"""Reproduced rows as a table for the terminal and as JSON."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table

from simulator.papers.gains import GAIN_KEYS
from simulator.papers.reproduction import Column, Reproduced, Reproduction, Row, Value


def make_table(reproduction: Reproduction, found: Reproduced) -> Table:
    """Returns a table of the rows in order, with the paper's figures beside, and the rows that the
    paper lacks at the end. A line separates the values of the first column."""
    table = Table(
        title=f"{reproduction.about}\n{reproduction.source}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in reproduction.columns:
        for title in _titles(column):
            table.add_column(title, justify="right" if column.format else "left", no_wrap=True)
    first = reproduction.columns[0].key
    rows = found.rows + found.not_in_paper
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        cells = [cell for column in reproduction.columns for cell in _cells(column, row)]
        ends = following is None or following[first] != row[first]
        table.add_row(*cells, end_section=ends)
    if found.not_in_paper:
        table.caption = "Rows without figures of the paper are not in the paper."
    return table


def make_gains_table(gains: list[Row]) -> Table:
    """Returns a table with a line per change that the paper prints and ours."""
    table = Table(title="Changes in percent", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    where = [key for key in gains[0] if key not in GAIN_KEYS]
    for title in (*where, "of", "over", "measure"):
        table.add_column(title, no_wrap=True)
    for title in ("ours", "paper"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("direction", no_wrap=True)
    for gain in gains:
        table.add_row(
            *(str(gain[key]) for key in where),
            *(str(gain[key]) for key in ("scheduler", "baseline", "measure")),
            _show_range(gain["low_pct"], gain["high_pct"]),
            _show_range(gain["paper_low_pct"], gain["paper_high_pct"]),
            "holds" if gain["same_direction"] else "does not hold",
        )
    return table


def _show_range(low: Value, high: Value) -> str:
    ends = dict.fromkeys((_show(low, "+.1f"), _show(high, "+.1f")))
    return " to ".join(ends)


def _titles(column: Column) -> Iterator[str]:
    yield column.title
    if column.beside:
        yield "paper"
    if column.relative:
        yield "Δ %"


def _cells(column: Column, row: Row) -> Iterator[str]:
    ours = row[column.key]
    yield _show(ours, column.format)
    if not column.beside:
        return
    paper = row[f"paper_{column.key}"]
    yield _show(paper, column.format)
    if column.relative:
        if isinstance(ours, int | float) and isinstance(paper, int | float) and paper:
            yield f"{100 * (ours / paper - 1):+.1f}"
        else:
            yield ""


def _show(value: Value, spec: str) -> str:
    return "" if value is None else format(value, spec)

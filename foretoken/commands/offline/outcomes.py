"""`foretoken outcomes`: prints where the outcomes come from that a predictor learns from."""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.usage import UsageError, near

if TYPE_CHECKING:
    from foretoken.offline.outcome_sources import SourceCount
    from services.predictor.learning.records import Record

NAME_CHARS = 40
ADVICE = """\
A server that starts with `--set log.leave_out=NAME,NAME` does not learn from these schedulers and
API keys. Their outcomes stay in the log."""


def outcomes(
    log: Annotated[
        str,
        typer.Argument(
            metavar="[LOG]",
            help="A file or redis:// URL (log.path), or a folder (--state-dir).",
            show_default="the user's state folder",
        ),
    ] = "",
    by: Annotated[
        str,
        typer.Option(metavar="COLUMNS", help="Of scheduler, key, application, day and hour."),
    ] = "scheduler,key,application",
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="The most rows to print.")] = 50,
) -> None:
    """Count what forecasts are learned from by scheduler, API key, application and time.

    The log of outcomes is only read, also while a server writes it.
    """
    import asyncio

    from foretoken.offline.outcome_sources import count_sources
    from foretoken.running.state_folder import find_outcomes
    from services.runtime.outcomelog import LogUnavailable

    columns = _parse_columns(by)
    for where in [log] if "://" in log else map(str, find_outcomes(log)):
        try:
            records, unreadable = asyncio.run(_read(where))
        except LogUnavailable as error:
            print(f"foretoken outcomes: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        print(f"{where.rpartition('@')[2]}: {len(records):,} outcomes")
        if unreadable:
            print(f"{unreadable:,} more cannot be read, and are not learned from")
        counts = count_sources(records, columns)
        for line in _format_table(columns, counts[:rows]):
            print(line)
        if len(counts) > rows:
            print(f"… and {len(counts) - rows:,} rows more; --rows {len(counts)} prints all")
        print()
    print(ADVICE)


def _parse_columns(by: str) -> list[str]:
    from foretoken.offline.outcome_sources import COLUMNS

    columns = [column.strip() for column in by.split(",")]
    for column in columns:
        if column not in COLUMNS:
            known = ", ".join(COLUMNS)
            raise UsageError(f"--by takes {known}; got {column!r}{near(column, COLUMNS)}")
    return columns


async def _read(where: str) -> "tuple[list[Record], int]":
    """The records of the log, and the number of rows that are none."""
    from services.predictor.learning.records import KIND, decode
    from services.runtime.outcomelog.reading import read_rows

    records, unreadable = [], 0
    async for row in read_rows(where):
        if row.kind == KIND:  # the same outcome may have a row of another kind
            try:
                records.append(decode(row, None))
            except ValueError:
                unreadable += 1
    return records, unreadable


def _format_table(columns: Sequence[str], counts: "Sequence[SourceCount]") -> Iterator[str]:
    from datetime import datetime

    def time_of(at_s: float) -> str:
        return datetime.fromtimestamp(at_s).strftime("%Y-%m-%d %H:%M")

    table = [(*columns, "outcomes", "mean tokens", "first", "last")]
    for count in counts:
        numbers = f"{count.outcomes:,}", f"{count.output_tokens / count.outcomes:,.0f}"
        times = time_of(count.first_s), time_of(count.last_s)
        table.append((*map(_format_name, count.names), *numbers, *times))
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    numeric = range(len(columns), len(columns) + 2)
    for line in table:
        cells = (
            cell.rjust(width) if index in numeric else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _format_name(name: str) -> str:
    """The name without what clients may have put in it to control the terminal; `-`: unknown."""
    shown = "".join(char if char.isprintable() else "?" for char in name)
    return (shown if len(shown) <= NAME_CHARS else f"{shown[: NAME_CHARS - 1]}…") or "-"

"""`foretoken reproduce`: simulates a paper's table and shows its figures beside the paper's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.offline.traffic import MAX_REQUESTS
from foretoken.commands.usage import UsageError, check_outputs, given_options, near

if TYPE_CHECKING:
    from simulator.papers.reproduction import ReportProgress, Reproduction

WIDTH = 140  # columns that a table needs


def reproduce(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Table to reproduce; without it, all are listed.")
    ] = "",
    json: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
    requests: Annotated[
        int,
        typer.Option(min=0, max=MAX_REQUESTS, help="Number of requests; 0: the table's own."),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    rows: Annotated[str, typer.Option(help="Only rows with this text in the name.")] = "",
    lengths: Annotated[
        Path | None,
        typer.Option(
            envvar="FORETOKEN_SHARED_DATA",
            help="Folder with files of lengths; without, they are drawn from quantiles.",
        ),
    ] = None,
) -> None:
    """Reproduce a table of a paper by simulation, with the paper's figures beside its own."""
    from simulator.papers.registry import REPRODUCTIONS

    given = given_options(context)
    if not name and given:
        raise UsageError(f"name a table to reproduce; known: {', '.join(REPRODUCTIONS)}")
    if not name:
        width = max(map(len, REPRODUCTIONS))
        for known, reproduction in REPRODUCTIONS.items():
            print(f"{known:<{width}}  {reproduction.about}; {reproduction.source}")
        return
    if name not in REPRODUCTIONS:
        listed = ", ".join(REPRODUCTIONS)
        raise UsageError(f"no table {name!r}{near(name, REPRODUCTIONS)}; known: {listed}")
    check_outputs(json)
    if "lengths" in given and not REPRODUCTIONS[name].reads_lengths:
        raise UsageError(f"--lengths: {name} reads no files of lengths")
    _reproduce(REPRODUCTIONS[name], json, requests, seed, rows, lengths)


def _reproduce(
    reproduction: "Reproduction",
    json: Path | None,
    requests: int,
    seed: int,
    rows: str,
    lengths: Path | None,
) -> None:
    from rich.console import Console

    from simulator.papers.reproduction import reproduce, select_cases
    from simulator.papers.table import make_gains_table, make_table
    from simulator.parallel import available_cores
    from simulator.rows import write_rows

    known = reproduction.list_cases(requests or reproduction.requests, seed, lengths)
    try:
        cases = select_cases(known, rows)
    except ValueError as error:
        raise UsageError(f"--rows: {error}") from None
    with _progress() as progress:
        found = reproduce(reproduction, cases, available_cores(), progress)
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(make_table(reproduction, found))
    if found.gains:
        console.print(make_gains_table(found.gains))
    if requests:
        console.print(f"The table has {reproduction.requests:,} requests, this run {requests:,}.")
    for note in reproduction.notes:
        console.print(note, highlight=False)
    if json:
        write_rows(json, found.rows, not_in_paper=found.not_in_paper, gains=found.gains)


@contextmanager
def _progress() -> "Iterator[ReportProgress]":
    from foretoken.running.console.bar import ProgressBar

    with ProgressBar("simulating") as bar:
        yield bar.show

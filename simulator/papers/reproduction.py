"""A reproduction: a paper's table as independent cases, and how its rows are shown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from simulator.parallel import run_parallel

Value = str | int | float | None
Row = dict[str, Value]
Compute = Callable[[], Row]
CompareRows = Callable[[Sequence["Row"]], list["Row"]]
ReportProgress = Callable[[str, int, int], None]
"""(name of the case that ended, ended cases, all cases)"""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a table. `compute` must be picklable: it may run in another process. The row of
    an `in_paper` case is in the paper's table."""

    name: str
    compute: Compute
    in_paper: bool = True


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the shown table. `format` formats its numbers. `beside` adds a column with the
    paper's value, `paper_<key>` of the row; `relative` adds to that the difference in percent."""

    key: str
    title: str
    format: str = ""
    beside: bool = False
    relative: bool = False


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A paper's table.

    `cases` makes its rows from a number of requests and a seed. `requests` is the default number:
    the paper's, unless its rows would take longer than minutes. `complete` adds figures that
    compare the rows. `notes` say where the results differ and why. `compare` lists the changes
    between rows for which the paper prints a range (gains.py). `cases_from` is `cases` with
    lengths from files in a folder; None if the table reads no files.
    """

    about: str
    source: str
    requests: int
    cases: Callable[[int, int], Sequence[Case]]
    columns: tuple[Column, ...]
    complete: Callable[[Sequence[Row]], list[Row]]
    notes: tuple[str, ...] = ()
    compare: CompareRows = lambda _: []
    cases_from: Callable[[Path, int, int], Sequence[Case]] | None = None

    @property
    def reads_lengths(self) -> bool:
        """Whether the table reads files of lengths; if not, a folder of them has no effect."""
        return self.cases_from is not None

    def list_cases(self, requests: int, seed: int, folder: Path | None = None) -> Sequence[Case]:
        """Returns the cases, with lengths from files in `folder` if the table reads files and a
        folder is given."""
        if folder and self.cases_from:
            return self.cases_from(folder, requests, seed)
        return self.cases(requests, seed)


@dataclass(frozen=True, slots=True)
class Reproduced:
    """Rows in the paper's order, additional rows that the paper lacks, and the changes between
    rows for which the paper prints a range."""

    rows: list[Row] = field(default_factory=list)
    not_in_paper: list[Row] = field(default_factory=list)
    gains: list[Row] = field(default_factory=list)


def divide(value: Value, by: Value) -> float | None:
    """Returns the ratio of two numbers of rows; None if one is missing or the second is not
    positive."""
    if not isinstance(value, int | float) or not isinstance(by, int | float) or by <= 0:
        return None
    return round(value / by, 3)


def select_cases(cases: Sequence[Case], text: str) -> list[Case]:
    """Returns the cases with the text in the name; upper and lower case are equal. Raises
    ValueError, with all names, if no name has it."""
    found = [case for case in cases if text.lower() in case.name.lower()]
    if not found:
        known = ", ".join(case.name for case in cases)
        raise ValueError(f"no row contains {text!r}; rows: {known}")
    return found


def reproduce(
    reproduction: Reproduction,
    cases: Sequence[Case],
    processes: int,
    progress: ReportProgress = lambda *_: None,
) -> Reproduced:
    """Computes the cases in up to `processes` processes; in this process if that is 1."""
    ended = count(1)

    def on_done(place: int) -> None:
        progress(cases[place].name, next(ended), len(cases))

    rows = run_parallel([case.compute for case in cases], processes, on_done)
    completed = list(zip(cases, reproduction.complete(rows), strict=True))
    return Reproduced(
        [row for case, row in completed if case.in_paper],
        [row for case, row in completed if not case.in_paper],
        reproduction.compare(rows),
    )

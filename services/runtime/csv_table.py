"""CSV files, plain or gzip, as columns; errors name the file, the line and the column."""

import csv
import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO, cast

import numpy as np
from numpy.typing import NDArray

from services.forecast import Floats, Ints

GZIP_MAGIC = b"\x1f\x8b"
MAX_FIELD_BYTES = 2**24
MAX_TOKENS = 10**9
Names = Sequence[str]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class CsvTable:
    """The chosen columns of a file as texts; `lines` is the line on which each row ends."""

    path: Path
    lines: Sequence[int]
    columns: Mapping[str, Sequence[str]]

    def numbers(self, name: str) -> Floats:
        """Returns a column of finite numbers. Raises ValueError for any other cell."""
        texts = self.columns[name]
        numbers: Floats = np.array([_number(text) for text in texts])
        self.require(np.isfinite(numbers), name, "a number")
        return numbers

    def lengths(self, name: str, least: int = 1) -> Ints:
        """Returns a column of token counts from `least` on. Raises ValueError for any other
        cell."""
        numbers = self.numbers(name)
        valid = (numbers >= least) & (numbers <= MAX_TOKENS) & (numbers % 1 == 0)
        self.require(valid, name, f"a whole number from {least} to {MAX_TOKENS:,}")
        return numbers.astype(np.int64)

    def require(self, valid: Bools, name: str, what: str) -> None:
        """Raises ValueError for the first row of a column that is not valid; the error says `what`
        the cell must be."""
        if not valid.all():
            row = int(np.argmin(valid))
            raise ValueError(
                f"{self.path}, line {self.lines[row]}: {name} must be {what}, "
                f"got {self.columns[name][row]!r}"
            )


def read_csv(path: Path, *required: Names, optional: Names = (), most: int = 0) -> CsvTable:
    """Returns the columns of the first of the `required` sets that the file has, and those of
    `optional`.

    Reads the first `most` rows, 0 for all; blank lines are no rows. Raises ValueError for a file
    that cannot be read, has none of the sets, has a row that is too short, or has no row.
    """
    try:
        with open_text(path) as file:
            return _read_rows(path, file, required, optional, most)
    except csv.Error as error:
        raise ValueError(f"cannot read {path}: {error}") from None


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Opens a file, plain or gzip, as UTF-8. Raises ValueError, also within the block, if it cannot
    be read."""
    try:
        with path.open("rb") as file:
            is_gzip = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        opened = gzip.open if is_gzip else open
        with opened(path, "rt", newline="", encoding="utf-8-sig") as text:
            yield cast(TextIO, text)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read {path}: {reason}") from None


def _read_rows(
    path: Path, file: TextIO, required: Sequence[Names], optional: Names, most: int
) -> CsvTable:
    csv.field_size_limit(MAX_FIELD_BYTES)
    reader = csv.reader(file)
    header: list[str] = next(reader, [])
    names = next((names for names in required if set(names) <= set(header)), None)
    if names is None:
        sets = ", or ".join(", ".join(names) for names in required)
        raise ValueError(f"{path} needs the columns {sets}; it has {', '.join(header) or 'none'}")
    places = {name: header.index(name) for name in (*names, *optional) if name in header}
    columns: dict[str, list[str]] = {name: [] for name in places}
    lines: list[int] = []
    rows = (row for row in reader if row)  # the csv module gives a blank line as an empty row
    for row in islice(rows, most or None):
        if len(row) < len(header):
            raise ValueError(f"{path}, line {reader.line_num}: {len(row)} of {len(header)} columns")
        lines.append(reader.line_num)
        for name, place in places.items():
            columns[name].append(row[place])
    if not lines:
        raise ValueError(f"{path} has no rows")
    return CsvTable(path, lines, columns)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan

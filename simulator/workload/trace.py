"""Traces: CSV files of requests, plain or gzip."""

import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from services.forecast import Floats, Ints
from simulator.workload.workload import Workload

ARRIVAL, INPUT, OUTPUT = "arrival_s", "input_tokens", "output_tokens"
KIND, PROMPT = "kind", "prompt"
MAX_PROMPT_BYTES = 2**24  # of one field


def read_trace(path: Path, most: int = 0) -> Workload:
    """The requests of a trace, sorted by arrival and shifted so that the first arrives at 0.

    Columns: `arrival_s,input_tokens,output_tokens[,kind][,prompt]`; others are ignored. Only the
    first `most` rows are read, 0 for all. Raises ValueError that names the file, the line and the
    column of a bad value.
    """
    columns = _read_columns(path, (ARRIVAL, INPUT, OUTPUT), (KIND, PROMPT), most)
    arrival_s = _floats(path, ARRIVAL, columns[ARRIVAL])
    order = np.argsort(arrival_s, kind="stable")
    arrival_s = arrival_s[order]
    kinds, prompts = columns.get(KIND, []), columns.get(PROMPT, [])
    return Workload(
        path.name.removesuffix(".gz").removesuffix(".csv"),
        arrival_s - arrival_s[0],
        _lengths(path, INPUT, columns[INPUT])[order],
        _lengths(path, OUTPUT, columns[OUTPUT])[order],
        [kinds[row] for row in order] if kinds else (),
        [prompts[row] for row in order] if prompts else (),
    )


def read_lengths(path: Path) -> tuple[Ints, Ints]:
    """Input and output tokens of a file with these columns, row by row. Raises ValueError as
    `read_trace` does."""
    columns = _read_columns(path, (INPUT, OUTPUT), (), 0)
    return _lengths(path, INPUT, columns[INPUT]), _lengths(path, OUTPUT, columns[OUTPUT])


def _read_columns(
    path: Path, required: tuple[str, ...], optional: tuple[str, ...], most: int
) -> dict[str, list[str]]:
    try:
        with _open(path) as file:
            return _parse(path, csv.reader(file), required, optional, most)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def _open(path: Path) -> io.TextIOBase:
    csv.field_size_limit(MAX_PROMPT_BYTES)
    if path.suffix == ".gz":
        return gzip.open(path, "rt", newline="")
    return path.open(newline="")


def _parse(
    path: Path,
    rows: Iterator[list[str]],
    required: tuple[str, ...],
    optional: tuple[str, ...],
    most: int,
) -> dict[str, list[str]]:
    header = next(rows, [])
    if missing := [name for name in required if name not in header]:
        raise ValueError(
            f"{path} has no column {' or '.join(missing)}; its columns are {', '.join(header)}"
        )
    places = {name: header.index(name) for name in (*required, *optional) if name in header}
    columns: dict[str, list[str]] = {name: [] for name in places}
    for number, row in enumerate(rows, start=2):
        if most and number > most + 1:
            break
        if len(row) < len(header):
            raise ValueError(f"{path}, line {number}: {len(row)} of {len(header)} columns")
        for name, place in places.items():
            columns[name].append(row[place])
    if not columns[required[0]]:
        raise ValueError(f"{path} has no requests")
    return columns


def _lengths(path: Path, name: str, texts: list[str]) -> Ints:
    numbers = _floats(path, name, texts)
    if bad := [row for row, number in enumerate(numbers) if number < 1 or number % 1]:
        raise ValueError(
            f"{path}, line {bad[0] + 2}: {name} must be a whole number of at least 1, "
            f"got {texts[bad[0]]!r}"
        )
    return numbers.astype(np.int64)


def _floats(
    path: Path, name: str, texts: list[str]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    try:
        numbers: Floats = np.array(texts, float)
    except ValueError:
        numbers = np.array([_number(text) for text in texts])
    if bad := np.flatnonzero(~np.isfinite(numbers)).tolist():
        raise ValueError(
            f"{path}, line {bad[0] + 2}: {name} must be a number, got {texts[bad[0]]!r}"
        )
    return numbers


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan

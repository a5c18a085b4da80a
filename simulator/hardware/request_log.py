"""Request logs: when each request of a server was scheduled, and its first and last token."""

import csv
import gzip
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.costs import StepTiming
from services.forecast import Floats
from services.policies.snapshot import Bools

LOG_COLUMNS = ("input_tokens", "output_tokens", "scheduled_s", "first_token_s", "last_token_s")
STEP_COLUMNS = ("prefill_tokens", "decode_seqs", "context_tokens", "elapsed_s")


@dataclass(frozen=True)
class RequestLog:
    """Columns, one row per request; times in seconds on the engine's clock.

    Raises ValueError for columns that differ in length or are empty, for tokens below 1, and for
    times out of order.
    """

    input_tokens: Floats
    output_tokens: Floats
    scheduled_s: Floats
    first_token_s: Floats
    last_token_s: Floats

    def __post_init__(self) -> None:
        if len({len(self.columns[name]) for name in LOG_COLUMNS}) != 1 or not len(self):
            raise ValueError("the log's columns are empty or differ in length")
        tokens = np.minimum(self.input_tokens, self.output_tokens)
        self._require(tokens >= 1, "input_tokens and output_tokens must be at least 1")
        self._require(
            (self.scheduled_s <= self.first_token_s) & (self.first_token_s <= self.last_token_s),
            "scheduled_s, first_token_s and last_token_s must not decrease",
        )
        more = self.output_tokens > 1
        self._require(
            ~more | (self.first_token_s < self.last_token_s),
            "more than one output token takes time",
        )

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def columns(self) -> Mapping[str, Floats]:
        return {name: getattr(self, name) for name in LOG_COLUMNS}

    def _require(self, valid: Bools, message: str) -> None:
        if not valid.all():
            raise ValueError(f"request {int(np.argmin(valid)) + 1}: {message}")


def read_timings(path: Path) -> RequestLog | list[StepTiming]:
    """A CSV file, plain or gzip, with the columns of a request log or of step timings.

    Other columns are ignored. Raises ValueError, which names the file, and the line and value of a
    cell that is not a number.
    """
    lines = _read_lines(path)
    reader = csv.DictReader(lines)
    header = reader.fieldnames or ()
    for names in (LOG_COLUMNS, STEP_COLUMNS):
        if set(names) <= set(header):
            columns = _numbers(reader, names, path)
            break
    else:
        raise ValueError(
            f"{path} has neither the columns of a request log ({', '.join(LOG_COLUMNS)}) nor those "
            f"of step timings ({', '.join(STEP_COLUMNS)})"
        )
    try:
        if names == LOG_COLUMNS:
            return RequestLog(*columns)
        prefill, decode, context, elapsed = columns
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    rows = zip(prefill, decode, context, elapsed, strict=True)
    return [StepTiming(int(p), int(d), int(c), float(e)) for p, d, c, e in rows]


def _read_lines(path: Path) -> list[str]:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return text.decode("utf-8-sig").splitlines()
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError):
        raise ValueError(f"{path} is neither a CSV file nor one packed with gzip") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _numbers(reader: "csv.DictReader[str]", names: Iterable[str], path: Path) -> tuple[Floats, ...]:
    rows: list[list[float]] = []
    for row in reader:
        numbers = []
        for name in names:
            try:
                numbers.append(float(row[name] or ""))
            except ValueError:
                raise ValueError(
                    f"{path}, line {reader.line_num}: {name} is {row[name]!r}, not a number"
                ) from None
        rows.append(numbers)
    return tuple(np.array(rows, float).reshape(len(rows), -1).T) if rows else ((np.empty(0),) * 5)

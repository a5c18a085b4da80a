"""Request logs: when each request of a server was scheduled, and its first and last token."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.costs import StepTiming
from services.forecast import Floats
from services.policies.snapshot import Bools
from services.runtime.csv_table import read_csv

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
    """Reads a CSV file, plain or gzip, with the columns of a request log or of step timings.

    Other columns are ignored. Raises ValueError that names the file, and the line and value of a
    cell that is not a number, of negative work of a step, or of a step that takes no time.
    """
    table = read_csv(path, LOG_COLUMNS, STEP_COLUMNS)
    columns = {name: table.numbers(name) for name in table.columns}
    if LOG_COLUMNS[0] in columns:
        try:
            return RequestLog(**columns)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    *work, elapsed_s = STEP_COLUMNS
    for name in work:
        table.require(columns[name] >= 0, name, "0 or more")
    table.require(columns[elapsed_s] > 0, elapsed_s, "more than 0")
    rows = zip(*(columns[name] for name in STEP_COLUMNS), strict=True)
    return [StepTiming(int(p), int(d), int(c), float(e)) for p, d, c, e in rows]

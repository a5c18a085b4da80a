"""What a batching policy sees and says: one worker's running and queued requests, in columns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from services.core import Wait
from services.forecast import ForecastTable, Ints


@dataclass(frozen=True, slots=True)
class Columns:
    """Requests, one row each. `output` tokens are those generated so far, `forecast` indexes the
    group's table, and `prompt + output` tokens are held in KV (or will be, once admitted)."""

    prompt: Ints
    output: Ints
    max_tokens: Ints
    forecast: Ints

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def held(self) -> Ints:
        return self.prompt + self.output

    def head(self, rows: int) -> "Columns":
        return self.part(0, rows)

    def part(self, start: int, end: int) -> "Columns":
        part = slice(start, end)
        return Columns(
            self.prompt[part], self.output[part], self.max_tokens[part], self.forecast[part]
        )


@dataclass(frozen=True, slots=True)
class GroupView:
    """One worker's round: its capacity in KV tokens, who runs, and who waits, in order."""

    kv_tokens: int
    max_running: int
    running: Columns
    queued: Columns
    forecasts: ForecastTable

    @property
    def room(self) -> int:
        """How many of the queue the limit on running requests lets in."""
        return min(len(self.queued), max(0, self.max_running - len(self.running)))


@dataclass(frozen=True, slots=True)
class Decision:
    """Admit the first `admit` of the queue; the memory peak then foreseen, in tokens; and why the
    next one waits (None when nobody is left to)."""

    admit: int
    peak_tokens: float
    wait: Wait | None


Params = Mapping[str, float]
Policy = Callable[[GroupView, Params, np.random.Generator], Decision]

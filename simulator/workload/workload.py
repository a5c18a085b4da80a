"""Workload: the requests of a run, in columns."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from services.core import Request
from services.forecast import Floats, Forecast, Ints
from services.predictor.interface import Features

MAX_SPAN_S = 10 * 365 * 86_400  # the times of a run are doubles, exact to 0.1 µs within it
MIN_RATE, MAX_RATE = 1e-6, 10**9  # requests per second; outside, times of steps are lost
T = TypeVar("T")


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival: arrival times in seconds, lengths in tokens.

    Each other column has a row per request, or is empty if unknown. `hash_ids` are the numbers of
    each prompt's blocks. The predictor `given` answers `forecasts`, or `forecast_tokens` as certain
    lengths. `features` are the embeddings of the prompts; a run computes those that it needs.
    `requests` are recorded requests with their settings, with times on the clock of `arrival_s`.
    With `clients`, the load is a closed loop: that many clients each send their next request when
    the previous one ends, and `arrival_s` is ignored. Raises ValueError for
    columns that differ in length, arrivals that decrease or are later than MAX_SPAN_S, and lengths
    below 1.
    """

    name: str
    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    kinds: Sequence[str] = ()
    prompts: Sequence[str] = ()
    hash_ids: Sequence[Sequence[int]] = ()
    forecast_tokens: Sequence[int] = ()
    forecasts: Sequence[Forecast] = field(default=(), repr=False)
    features: Sequence[Features] = field(default=(), repr=False)
    clients: int = 0
    requests: Sequence[Request] = ()

    def __post_init__(self) -> None:
        sizes = {len(self.arrival_s), len(self.input_tokens), len(self.output_tokens)}
        known = (self.kinds, self.prompts, self.hash_ids, self.forecast_tokens, self.forecasts)
        sizes |= {len(column) for column in (*known, self.features, self.requests) if column}
        if len(sizes) != 1:
            raise ValueError(f"{self.name}: the columns have {sorted(sizes)} rows")
        if not len(self):
            raise ValueError(f"{self.name}: there is no request")
        if not np.all(np.diff(self.arrival_s, prepend=0.0) >= 0):
            raise ValueError(f"{self.name}: arrival_s must be numbers from 0 on, ascending")
        if self.arrival_s[-1] > MAX_SPAN_S:
            raise ValueError(
                f"{self.name}: the last request arrives after {self.arrival_s[-1]:.3g} s, and a "
                f"simulation covers {MAX_SPAN_S:,} s (10 years): give arrival times in seconds, "
                "fewer requests or a higher rate"
            )
        if min(self.input_tokens.min(), self.output_tokens.min()) < 1:
            raise ValueError(f"{self.name}: input_tokens and output_tokens must be at least 1")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate(self) -> float:
        """Mean arrivals per second; infinite for a burst."""
        span_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span_s if span_s else np.inf

    @property
    def least_rate(self) -> float:
        """The least rate for `at_rate`, with arrivals within MAX_SPAN_S."""
        return max(MIN_RATE, len(self) / MAX_SPAN_S)

    def take(self, rows: Ints) -> "Workload":
        """Returns the requests at these ascending places."""
        return replace(
            self,
            arrival_s=self.arrival_s[rows],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            kinds=_pick(self.kinds, rows),
            prompts=_pick(self.prompts, rows),
            hash_ids=_pick(self.hash_ids, rows),
            forecast_tokens=_pick(self.forecast_tokens, rows),
            forecasts=_pick(self.forecasts, rows),
            features=_pick(self.features, rows),
            requests=_pick(self.requests, rows),
        )

    def at_rate(self, rate: float) -> "Workload":
        """Returns the requests with arrivals stretched to this mean rate. Raises ValueError for a
        burst, which has no rate."""
        if not np.isfinite(self.rate):
            raise ValueError(f"{self.name}: all requests arrive at once; a rate does not apply")
        start = self.arrival_s[0]
        return replace(self, arrival_s=(self.arrival_s - start) * (self.rate / rate))

    def hold_out(self, count: int) -> tuple["Workload", "Workload"]:
        """Splits off the first `count` requests from the others, and shifts those so that the first
        of them arrives at 0. Raises ValueError unless both parts have requests."""
        if not 0 < count < len(self):
            raise ValueError(
                f"{self.name} has {len(self):,} requests: hold out 1 to {len(self) - 1:,}, not "
                f"{count:,}"
            )
        first, rest = self.take(np.arange(count)), self.take(np.arange(count, len(self)))
        return first, replace(rest, arrival_s=rest.arrival_s - rest.arrival_s[0])


def _pick(column: Sequence[T], rows: Ints) -> Sequence[T]:
    return [column[row] for row in rows.tolist()] if column else ()

"""Workload: the requests of a run, in columns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.core import Request
from services.forecast import Floats, Ints


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival: arrival times in seconds, lengths in tokens.

    `kinds`, `prompts`, `hash_ids`, the numbers of each prompt's blocks, and `forecast_tokens`, the
    answers of the predictor `given`, are parallel to the columns, or empty if unknown, and so are
    `requests`: what recorded requests say of themselves beside their lengths, with times on the
    clock of `arrival_s`. With `clients`, the load is a closed loop: that many clients each send
    their next request when the previous one ends, and `arrival_s` is ignored. Raises ValueError for
    columns that differ in length, arrivals that decrease, and lengths below 1.
    """

    name: str
    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    kinds: Sequence[str] = ()
    prompts: Sequence[str] = ()
    hash_ids: Sequence[Sequence[int]] = ()
    forecast_tokens: Sequence[int] = ()
    clients: int = 0
    requests: Sequence[Request] = ()

    def __post_init__(self) -> None:
        sizes = {len(self.arrival_s), len(self.input_tokens), len(self.output_tokens)}
        others = (self.kinds, self.prompts, self.hash_ids, self.forecast_tokens, self.requests)
        sizes |= {len(column) for column in others if column}
        if len(sizes) != 1:
            raise ValueError(f"{self.name}: the columns have {sorted(sizes)} rows")
        if not len(self):
            raise ValueError(f"{self.name}: there is no request")
        if not np.all(np.diff(self.arrival_s, prepend=0.0) >= 0):
            raise ValueError(f"{self.name}: arrival_s must be numbers from 0 on, ascending")
        if min(self.input_tokens.min(), self.output_tokens.min()) < 1:
            raise ValueError(f"{self.name}: input_tokens and output_tokens must be at least 1")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate(self) -> float:
        """Mean arrivals per second; infinite for a burst."""
        span_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span_s if span_s else np.inf

    def take(self, rows: Ints) -> "Workload":
        """Some of the requests, given by their ascending places."""
        return replace(
            self,
            arrival_s=self.arrival_s[rows],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            kinds=[self.kinds[row] for row in rows] if self.kinds else (),
            prompts=[self.prompts[row] for row in rows] if self.prompts else (),
            hash_ids=[self.hash_ids[row] for row in rows] if self.hash_ids else (),
            forecast_tokens=(
                [self.forecast_tokens[row] for row in rows] if self.forecast_tokens else ()
            ),
            requests=[self.requests[row] for row in rows] if self.requests else (),
        )

    def at_rate(self, rate: float) -> "Workload":
        """The same requests with arrivals stretched to this mean rate. Raises ValueError for a
        burst, which has no rate."""
        if not np.isfinite(self.rate):
            raise ValueError(f"{self.name}: all requests arrive at once; a rate does not apply")
        start = self.arrival_s[0]
        return replace(self, arrival_s=(self.arrival_s - start) * (self.rate / rate))

"""When requests are sent. Pure: the random generator is an argument.

An open loop sends each request when it is due, whether or not earlier ones have ended. A closed
loop keeps a fixed number in flight and sends the next request when one ends.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

Gaps = Callable[[float, Random], float]  # mean gap in seconds → next gap

ARRIVALS: Mapping[str, Gaps] = MappingProxyType(
    {
        "poisson": lambda mean_s, rng: rng.expovariate(1 / mean_s),
        "constant": lambda mean_s, _: mean_s,
    }
)


@dataclass(frozen=True)
class Load:
    """The load of one server in one round.

    rate: requests per second of an open loop; 0 selects a closed loop of `concurrency`.
    requests, seconds: sending ends at whichever comes first; 0 is no limit.
    """

    requests: int = 200
    seconds: float = 0.0
    rate: float = 0.0
    arrivals: str = "poisson"
    concurrency: int = 8

    def __post_init__(self) -> None:
        if not (self.requests or self.seconds):
            raise ValueError("the load has no end: set --requests or --seconds")
        if self.arrivals not in ARRIVALS:
            raise ValueError(f"unknown arrivals {self.arrivals!r}; known: {', '.join(ARRIVALS)}")

    @property
    def max_requests(self) -> int:
        """Upper bound on the requests sent; 0 is no bound."""
        if self.requests or not self.rate:
            return self.requests
        return max(1, round(self.rate * self.seconds))

    def __str__(self) -> str:
        if self.rate:
            return f"open loop, {self.rate:g} requests/s, {self.arrivals}"
        return f"closed loop, {self.concurrency} in flight"


def due_times_s(load: Load, rng: Random) -> list[float]:
    """Returns the send times of an open loop, ascending from 0, in seconds."""
    gap, mean_s = ARRIVALS[load.arrivals], 1 / load.rate
    times: list[float] = []
    at_s = 0.0
    bounded = not load.requests
    while bounded or len(times) < load.requests:
        if load.seconds and at_s >= load.seconds:
            break
        times.append(at_s)
        at_s += gap(mean_s, rng)
    return times

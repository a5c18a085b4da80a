"""When requests are sent. Pure: the chance is a generator that is passed in.

An open loop sends when a request is due, whatever became of those before it, as users do who don't
know of one another. A closed loop keeps so many under way: the next one is sent when one ends.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

Gaps = Callable[[float, Random], float]  # the mean in seconds → the next gap

ARRIVALS: Mapping[str, Gaps] = MappingProxyType(
    {
        "poisson": lambda mean_s, rng: rng.expovariate(1 / mean_s),
        "constant": lambda mean_s, _: mean_s,
    }
)


@dataclass(frozen=True)
class Load:
    """What is asked of one server in one round.

    rate: requests a second of an open loop; 0: a closed loop of `concurrency`.
    requests, seconds: where sending ends, whichever comes first; 0 where that is no end.
    """

    requests: int = 200
    seconds: float = 0.0
    rate: float = 0.0
    arrivals: str = "poisson"
    concurrency: int = 8

    def __post_init__(self) -> None:
        if not (self.requests or self.seconds):
            raise ValueError("a load needs an end: --requests or --seconds")
        if self.arrivals not in ARRIVALS:
            raise ValueError(f"unknown arrivals {self.arrivals!r}; known: {', '.join(ARRIVALS)}")

    @property
    def most(self) -> int:
        """Requests that are sent at most; 0: as many as the seconds hold."""
        if self.requests or not self.rate:
            return self.requests
        return max(1, round(self.rate * self.seconds))

    def __str__(self) -> str:
        if self.rate:
            return f"open loop, {self.rate:g} requests/s, {self.arrivals}"
        return f"closed loop, {self.concurrency} at once"


def due_times_s(load: Load, rng: Random) -> list[float]:
    """Of an open loop, from its beginning: never falling, the first at 0, at most `load.most`, all
    before `load.seconds` where that is an end."""
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

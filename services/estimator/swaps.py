"""How long a token of KV takes between device and host memory, from swaps as they were measured."""

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from math import isfinite

from services.costs import Direction, SwapTiming

Sample = tuple[float, int]  # seconds a token, tokens


class SwapRates:
    """Seconds a token each way, over the latest WINDOW swaps of that way.

    The rate is the median by token: half of the tokens went faster, half slower. Large swaps, in
    which the cost of a call vanishes, count for more, and pauses of the host for nothing while
    most tokens had none.
    """

    WINDOW = 256
    FEWEST = 3  # the first ones pay for what is set up lazily

    def __init__(self) -> None:
        self._samples: dict[Direction, deque[Sample]] = {
            direction: deque(maxlen=self.WINDOW) for direction in Direction
        }
        self._computed: dict[Direction, deque[Sample]] = {
            direction: deque(maxlen=self.WINDOW) for direction in Direction
        }

    def add(self, swap: SwapTiming) -> bool:
        """Keep a sample; False for one that says nothing: no tokens, no positive finite time."""
        if swap.tokens <= 0 or not isfinite(swap.elapsed_s) or swap.elapsed_s <= 0:
            return False
        self._samples[swap.direction].append((swap.elapsed_s / swap.tokens, swap.tokens))
        if 0 <= swap.quantize_s <= swap.elapsed_s:
            self._computed[swap.direction].append((swap.quantize_s / swap.tokens, swap.tokens))
        return True

    def token_s(self, direction: Direction) -> float:
        """0 while fewer than FEWEST were seen. O(WINDOW · log WINDOW), some 30 µs."""
        return self._rate(self._samples[direction])

    @property
    def quantize_token_s(self) -> float:
        """What the device computes of a token, there and back; a way not yet known counts 0."""
        return sum(self._rate(samples) for samples in self._computed.values())

    def _rate(self, samples: deque[Sample]) -> float:
        return _median_by_token(samples) if len(samples) >= self.FEWEST else 0.0


def _median_by_token(samples: deque[Sample]) -> float:
    fastest_first = sorted(samples)
    upto = list(accumulate(tokens for _, tokens in fastest_first))
    return fastest_first[bisect_left(upto, upto[-1] / 2)][0]

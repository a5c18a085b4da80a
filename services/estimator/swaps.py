"""Time per token of KV transfers between device and host memory."""

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from math import isfinite

from services.costs import Direction, SwapTiming

Sample = tuple[float, int]  # seconds per token, tokens


class SwapRates:
    """Seconds per token in each direction, over the latest WINDOW swaps.

    The rate is the token-weighted median. Large swaps, with little overhead per call, count more;
    host pauses have no influence while most tokens had none.
    """

    WINDOW = 256
    MIN_SAMPLES = 3  # the first swaps include lazy initialisation

    def __init__(self) -> None:
        self._samples: dict[Direction, deque[Sample]] = {
            direction: deque(maxlen=self.WINDOW) for direction in Direction
        }
        self._computed: dict[Direction, deque[Sample]] = {
            direction: deque(maxlen=self.WINDOW) for direction in Direction
        }

    def add(self, swap: SwapTiming) -> bool:
        """Stores a sample; returns False for one without tokens or a positive finite time."""
        if swap.tokens <= 0 or not isfinite(swap.elapsed_s) or swap.elapsed_s <= 0:
            return False
        self._samples[swap.direction].append((swap.elapsed_s / swap.tokens, swap.tokens))
        if 0 <= swap.quantize_s <= swap.elapsed_s:
            self._computed[swap.direction].append((swap.quantize_s / swap.tokens, swap.tokens))
        return True

    def token_s(self, direction: Direction) -> float:
        """0 with fewer than MIN_SAMPLES samples. O(WINDOW · log WINDOW), about 30 µs."""
        return self._rate(self._samples[direction])

    @property
    def quantize_token_s(self) -> float:
        """Device time per token in both directions; an unknown direction counts 0."""
        return sum(self._rate(samples) for samples in self._computed.values())

    def _rate(self, samples: deque[Sample]) -> float:
        return _median_by_token(samples) if len(samples) >= self.MIN_SAMPLES else 0.0


def _median_by_token(samples: deque[Sample]) -> float:
    fastest_first = sorted(samples)
    upto = list(accumulate(tokens for _, tokens in fastest_first))
    return fastest_first[bisect_left(upto, upto[-1] / 2)][0]

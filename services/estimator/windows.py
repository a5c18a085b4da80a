"""Bounded windows of measurements: step timings, swap timings, and errors of estimates."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from services.costs import MAX_S, Direction, StepTiming, SwapTiming
from services.runtime.bounded_dict import BoundedDict

Cell = tuple[int, int, int]
SwapSample = tuple[float, int]  # seconds per token, tokens


class StepWindow:
    """The latest samples of every kind of step, `window` in total.

    Steps have three shapes (prefill only, decode only, mixed). Each shape gets a third of the
    window, divided into cells of similar size (powers of two of prefill tokens, sequences and
    context tokens) with `CELL` samples each. A full cell drops its oldest sample; a shape with too
    many cells drops the least recently updated one. A worker's first profile therefore stays until
    newer steps of the same size replace it.
    """

    CELL = 8
    SHAPES = 3

    def __init__(self, window: int):
        self._cells_per_shape = max(1, window // (self.SHAPES * self.CELL))
        self._shapes: dict[tuple[bool, bool], BoundedDict[Cell, deque[StepTiming]]] = {}

    def add(self, timing: StepTiming) -> bool:
        """Stores a sample; returns False for one without work or a plausible time."""
        shape = (timing.prefill_tokens > 0, timing.decode_seqs > 0)
        if not any(shape) or not 0 < timing.elapsed_s <= MAX_S:
            return False
        cells = self._shapes.setdefault(shape, BoundedDict(self._cells_per_shape))
        cell = _cell(timing)
        cells[cell] = samples = cells.pop(cell, None) or deque(maxlen=self.CELL)
        samples.append(timing)
        return True

    def __iter__(self) -> Iterator[StepTiming]:
        for cells in self._shapes.values():
            for samples in cells.values():
                yield from samples

    def __len__(self) -> int:
        return sum(len(s) for cells in self._shapes.values() for s in cells.values())


def _cell(timing: StepTiming) -> Cell:
    return (
        timing.prefill_tokens.bit_length(),
        timing.decode_seqs.bit_length(),
        timing.context_tokens.bit_length(),
    )


class SwapRates:
    """Seconds per token in each direction, over the latest WINDOW swaps.

    The rate is the token-weighted median. Large swaps, with little overhead per call, count more;
    host pauses have no influence while most tokens had none.
    """

    WINDOW = 256
    MIN_SAMPLES = 3  # the first swaps include lazy initialisation

    def __init__(self) -> None:
        self._samples: dict[Direction, deque[SwapSample]] = {
            direction: deque(maxlen=self.WINDOW) for direction in Direction
        }
        self._computed: dict[Direction, deque[SwapSample]] = {
            direction: deque(maxlen=self.WINDOW) for direction in Direction
        }

    def add(self, swap: SwapTiming) -> bool:
        """Stores a sample; returns False for one without tokens or a plausible time."""
        if swap.tokens <= 0 or not 0 < swap.elapsed_s <= MAX_S:
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

    def _rate(self, samples: deque[SwapSample]) -> float:
        return _median_by_token(samples) if len(samples) >= self.MIN_SAMPLES else 0.0


def _median_by_token(samples: deque[SwapSample]) -> float:
    fastest_first = sorted(samples)
    upto = list(accumulate(tokens for _, tokens in fastest_first))
    return fastest_first[bisect_left(upto, upto[-1] / 2)][0]


class ErrorWindow:
    """Relative errors of the latest WINDOW estimates, each made before it was learned from."""

    WINDOW = 512
    MIN_SAMPLES = 32  # fewer do not determine the 90th percentile

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=self.WINDOW)

    def add(self, expected_s: float, measured_s: float) -> None:
        """`measured_s` must be positive."""
        self._latest.append(abs(expected_s - measured_s) / measured_s)

    def __len__(self) -> int:
        return len(self._latest)

    def quantiles(self) -> tuple[float, float] | None:
        """Median and 90th percentile; None with fewer than MIN_SAMPLES. O(WINDOW)."""
        if len(self) < self.MIN_SAMPLES:
            return None
        median, p90 = np.quantile(np.fromiter(self._latest, float, len(self)), (0.5, 0.9))
        return float(median), float(p90)

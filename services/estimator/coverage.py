"""A bounded store of step timings that keeps samples of rare step sizes."""

from collections import deque
from collections.abc import Iterator
from math import isfinite

from services.costs import StepTiming
from services.runtime.bounded_dict import BoundedDict

Cell = tuple[int, int, int]


class Coverage:
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
        """Stores a sample; returns False for one without work or a positive finite time."""
        shape = (timing.prefill_tokens > 0, timing.decode_seqs > 0)
        if not any(shape) or not isfinite(timing.elapsed_s) or timing.elapsed_s <= 0:
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

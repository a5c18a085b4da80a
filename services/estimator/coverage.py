"""A bounded memory of step timings that no monotonous hour can wash out."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from math import isfinite

from services.costs import StepTiming

Cell = tuple[int, int, int]


class Coverage:
    """The latest samples of every kind of step seen, `window` in all.

    A step is of one of three shapes (prefill only, decode only, both); each shape has a third of
    the window, divided into cells of like size (powers of two of prefill tokens, sequences and
    context tokens) of `CELL` samples. A full cell forgets its oldest sample; a shape with too
    many cells forgets the one that was not seen for longest. So a worker's first profile stays
    until fresher steps of the same size replace it.
    """

    CELL = 8
    SHAPES = 3

    def __init__(self, window: int):
        self._cells_per_shape = max(1, window // (self.SHAPES * self.CELL))
        self._shapes: dict[tuple[bool, bool], OrderedDict[Cell, deque[StepTiming]]] = {}

    def add(self, timing: StepTiming) -> bool:
        """Keep a sample; False for one that says nothing: no work, or no positive finite time."""
        shape = (timing.prefill_tokens > 0, timing.decode_seqs > 0)
        if not any(shape) or not isfinite(timing.elapsed_s) or timing.elapsed_s <= 0:
            return False
        cells = self._shapes.setdefault(shape, OrderedDict())
        cell = _cell(timing)
        cells.setdefault(cell, deque(maxlen=self.CELL)).append(timing)
        cells.move_to_end(cell)
        if len(cells) > self._cells_per_shape:
            cells.popitem(last=False)
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

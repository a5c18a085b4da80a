"""Whether a recorded step gives what the engine gives: over random tokens, blocks and contexts."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from services.worker.kv.cache import KVCache
from services.worker.model.paged import SHIFT_MAX, SHIFT_MAX_HALF
from services.worker.model.probe import shift_of
from services.worker.requests.batch import DecodeRows, StepBatch
from services.worker.requests.prompt import Prompt
from services.worker.requests.sequence import Sequence

CONTEXT_TOKENS = 8_192  # at most: all rows together read no more than a step of such a size does
SHARED_BLOCKS = 256  # beside a block of each row's own, what contexts are made of
ROWS_AT_ONCE = 16  # compared in float32: logits are large
INT8_SCALE = 0.02


class RandomRows:
    """Batches of decodes over `blocks` blocks, with contexts of up to `reach_tokens`. Short ones
    are as frequent as long ones."""

    def __init__(self, blocks: int, block_tokens: int, reach_tokens: int, vocabulary: int):
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._reach_tokens = min(reach_tokens, CONTEXT_TOKENS)
        self._vocabulary = vocabulary
        self._rng = np.random.default_rng(0)

    def batch(self, rows: int) -> StepBatch:
        """Each row writes into a block of its own, and reads whichever others; O(tokens)."""
        longest = np.log(self._reach_tokens)
        lengths = np.exp(self._rng.uniform(0, longest, rows)).astype(int)
        tables = []
        for row, length in enumerate(lengths.tolist()):
            others = (length - 1) // self._block_tokens
            table = self._rng.integers(self._blocks, size=others).tolist()
            tables.append([*table, row])
        tokens = self._rng.integers(self._vocabulary, size=rows).tolist()
        sequences = [_sequence(t, n - 1) for t, n in zip(tokens, lengths.tolist(), strict=True)]
        return StepBatch(DecodeRows(sequences, tables, self._block_tokens), [])


def _sequence(token: int, computed: int) -> Sequence:
    """Only its newest token counts here, so it has no others."""
    sequence = Sequence.start(Prompt("\0check", (token,), 1, 1), 1)
    sequence.computed = computed
    return sequence


def checked_blocks(max_rows: int, blocks: int) -> int:
    """How many of the first blocks take part."""
    return min(blocks, max_rows + SHARED_BLOCKS)


@contextmanager
def random_contexts(cache: KVCache, blocks: int) -> Iterator[None]:
    """Numbers in the first `blocks` blocks, and zeros again behind it: as nobody was here yet, a
    row that reads another's blocks would see no difference."""
    first = [(layer.data[:, :blocks], layer.scales) for layer in cache.layers]
    generator = torch.Generator(cache.layers[0].data.device).manual_seed(0)
    try:
        for data, scales in first:
            if scales is None:
                data.normal_(generator=generator)
            else:
                data.random_(-127, 128, generator=generator)
                scales[:, :blocks].fill_(INT8_SCALE)
        yield
    finally:
        for data, scales in first:
            data.zero_()
            if scales is not None:
                scales[:, :blocks].zero_()


def difference(recorded: Tensor, eager: Tensor) -> str:
    """How two [rows, vocabulary] of logits differ, beyond rounding; empty where they don't."""
    most = SHIFT_MAX if eager.dtype is torch.float32 else SHIFT_MAX_HALF
    parts = [slice(i, i + ROWS_AT_ONCE) for i in range(0, len(eager), ROWS_AT_ONCE)]
    shifts = [shift_of(recorded[part], eager[part]) for part in parts]
    if all(shift <= most for shift in shifts):  # NaN is no less
        return ""
    return f"it moves logits by {max(shifts):.2%} of their size"

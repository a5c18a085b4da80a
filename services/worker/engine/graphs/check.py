"""Compares recorded steps with eager ones over random tokens, blocks and contexts."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from services.worker.kv.cache import KVCache
from services.worker.model.paged import MAX_SHIFT, MAX_SHIFT_HALF
from services.worker.model.probe import relative_shift
from services.worker.requests.types.batch import DecodeRows, StepBatch
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence

CONTEXT_TOKENS = 8_192  # at most: all rows together read no more than a step of this context
SHARED_BLOCKS = 256  # the contexts' blocks, besides one block per row
ROWS_AT_ONCE = 16  # compared in float32 at once: logits are large
INT8_SCALE = 0.02


class RandomRows:
    """Decode batches over `blocks` blocks with contexts up to `reach_tokens`, short ones as
    frequent as long ones."""

    def __init__(self, blocks: int, block_tokens: int, reach_tokens: int, vocabulary: int):
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._reach_tokens = min(reach_tokens, CONTEXT_TOKENS)
        self._vocabulary = vocabulary
        self._rng = np.random.default_rng(0)

    def batch(self, rows: int) -> StepBatch:
        """A batch in which each row writes to a separate block and reads any others. O(tokens)."""
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
    """A sequence with only its newest token, because no other matters."""
    sequence = Sequence.start(Prompt("\0check", (token,), 1, 1), 1)
    sequence.computed = computed
    return sequence


@contextmanager
def random_contexts(cache: KVCache, blocks: int) -> Iterator[None]:
    """Context in which the first `blocks` blocks hold random values; zeros afterwards. With zeros,
    a row that reads the blocks of another row would not be detected."""
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
    """How two [rows, vocabulary] tensors of logits differ beyond rounding; empty if they agree."""
    most = MAX_SHIFT if eager.dtype is torch.float32 else MAX_SHIFT_HALF
    parts = [slice(i, i + ROWS_AT_ONCE) for i in range(0, len(eager), ROWS_AT_ONCE)]
    shifts = [relative_shift(recorded[part], eager[part]) for part in parts]
    if all(shift <= most for shift in shifts):  # true for NaN, too
        return ""
    return f"its logits differ by {max(shifts):.2%} of their size"

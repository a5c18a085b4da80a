"""Contents of prompts: token ids that agree as far as the prompts begin alike.

A prefix cache compares token ids, and a trace has none. They are made from the trace's block hashes
or from its texts; which ids they are does not matter.
"""

from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np

from simulator.workload.workload import Workload

HASH_TOKENS = 512  # of each block in `hash_ids`, as in Mooncake's traces (Qin et al., FAST 2025)
_RESERVED = 2  # the simulator's answer tokens

Contents = Callable[[int], list[int]]
"""The token ids of the prompt of a workload's row."""


def contents_of(workload: Workload) -> Contents | None:
    """Returns contents from block hashes if the workload has them, else from texts; None without
    both."""
    if workload.hash_ids:
        return _block_contents(workload)
    return _text_contents(workload) if workload.prompts else None


def _block_contents(workload: Workload) -> Contents:
    inputs = workload.input_tokens.tolist()

    def content(row: int) -> list[int]:
        ids = np.array(workload.hash_ids[row], np.int64)
        return _fill(np.repeat(2 * ids, HASH_TOKENS).tolist(), inputs[row], row)

    return content


def _text_contents(workload: Workload) -> Contents:
    """A token is a piece of the text, of the workload's mean characters per token."""
    inputs, texts = workload.input_tokens.tolist(), workload.prompts
    width = max(1, round(sum(map(len, texts)) / sum(inputs)))

    def content(row: int) -> list[int]:
        text = texts[row]
        pieces = [text[at : at + width] for at in range(0, len(text), width)][: inputs[row]]
        return _fill([2 * (crc32(piece.encode()) >> 2) for piece in pieces], inputs[row], row)

    return content


def _fill(even: Sequence[int], length: int, row: int) -> list[int]:
    """Returns the ids of a prompt: the first ones from `even`, then the row's own odd id."""
    own = [_RESERVED + 2 * row + 1] * (length - len(even))
    return [_RESERVED + number for number in even[:length]] + own

"""Mends the masks of `allowed_token_ids` in vLLM 0.30's model runner V1; 0.31 has the same mend.

When a request takes the row of one that has ended, its mask stays in its earlier row, too, and
hides tokens of the next request that comes there. When two requests change places, both get the
mask of the second.
"""

from typing import Any

import vllm
from vllm.v1.worker.gpu_input_batch import InputBatch

AFFECTED = "0.30."


def mend_token_masks() -> None:
    """Once in each process of the replica. No effect in other versions."""
    if vllm.__version__.startswith(AFFECTED):
        InputBatch.condense = _clearing(InputBatch.condense)
        InputBatch.swap_states = _swapping(InputBatch.swap_states)


def _clearing(condense: Any) -> Any:
    def clear_moved(batch: Any) -> None:
        first = batch.num_reqs
        end = first + len(batch.batch_update_builder.removed)
        condense(batch)
        if (masks := batch.allowed_token_ids_mask_cpu_tensor) is not None:
            masks[first:end].fill_(False)

    return clear_moved


def _swapping(swap_states: Any) -> Any:
    def swap_masks(batch: Any, first: int, second: int) -> None:
        masks = batch.allowed_token_ids_mask_cpu_tensor
        mask = None if masks is None else masks[first].clone()
        swap_states(batch, first, second)
        if mask is not None:
            masks[second] = mask

    return swap_masks

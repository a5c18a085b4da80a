"""Arguments of Triton kernels: small arrays sent to the device, types, and pointers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.cuda.tiles import walk
from services.worker.kernels.cuda.work_split import Words
from services.worker.kv.cache import KVLayer

# Under TRITON_INTERPRET=1 kernels run on the CPU and are not JIT functions.
INTERPRETED = not isinstance(walk, triton.JITFunction)

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def require_runnable(device: torch.device) -> None:
    """Raises ValueError if the device does not run Triton."""
    if device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"the Triton kernels run on a CUDA device, not on {device}: set worker.kernels to auto"
        )


def count_processors(device: torch.device) -> int:
    """Number of multiprocessors; a few under the interpreter."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def products(dtype: torch.dtype, int8: bool) -> tuple[tl.dtype, tl.dtype]:
    """The types of the products q·k and p·v.

    With INT8, probabilities include the scales of the values, which may exceed the range of
    float16: bfloat16 replaces it. The interpreter multiplies bfloat16 as integers and gets float32.
    """
    scores = TYPES[dtype]
    outputs = tl.bfloat16 if int8 and dtype == torch.float16 else scores
    if INTERPRETED:
        scores, outputs = (tl.float32 if t == tl.bfloat16 else t for t in (scores, outputs))
    return scores, outputs


def send(arrays: Sequence[Words], device: torch.device) -> list[Tensor]:
    """Copies several arrays to the device in one transfer through pinned memory, without waiting.

    Each starts at a multiple of 16 bytes, because Triton would recompile for other pointers.
    """
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    starts = [0, *accumulate(sizes)]
    packed = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = torch.from_numpy(array.reshape(-1))
    # PyTorch does not reuse the pinned memory before the copy is complete.
    there = packed.to(device, non_blocking=True)
    return [there[start:end] for start, end in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class Paged:
    """A layer as kernel arguments. Without scales, the pointers of the scales are not read."""

    pointers: tuple[Tensor, ...]  # keys, values, their scales
    strides: tuple[int, ...]  # block, head, token; block and head of the scales
    int8: bool

    @classmethod
    def from_layer(cls, layer: KVLayer) -> "Paged":
        keys, values = layer.data.unbind()
        strides = keys.stride()[:3]
        if layer.scales is None:
            return cls((keys, values, keys, values), (*strides, 0, 0), False)
        scales = layer.scales.unbind()
        return cls((keys, values, *scales), (*strides, *scales[0].stride()[:2]), True)


def contiguous_rows(x: Tensor) -> Tensor:
    """Returns x with a contiguous last dimension, as every kernel requires."""
    return x if x.stride(-1) == 1 else x.contiguous()

"""Between the host and Triton: small arrays sent over, types and pointers as kernels take them."""

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

# Under TRITON_INTERPRET=1 kernels are no JIT functions, and run on the CPU.
INTERPRETED = not isinstance(walk, triton.JITFunction)

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def require_runnable(device: torch.device) -> None:
    """ValueError where the device runs no Triton."""
    if device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"the Triton kernels run on a CUDA device, not on {device}: set worker.kernels to auto"
        )


def processors_of(device: torch.device) -> int:
    """Multiprocessors; a handful where the interpreter stands in for a device."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def products(dtype: torch.dtype, int8: bool) -> tuple[tl.dtype, tl.dtype]:
    """What q·k and p·v are multiplied in.

    INT8's probabilities carry the values' scales, which may leave float16's range: bfloat16 then.
    The interpreter multiplies bfloat16 as the integers that hold it, so it gets float32.
    """
    scores = TYPES[dtype]
    outputs = tl.bfloat16 if int8 and dtype == torch.float16 else scores
    if INTERPRETED:
        scores, outputs = (tl.float32 if t == tl.bfloat16 else t for t in (scores, outputs))
    return scores, outputs


def send(arrays: Sequence[Words], device: torch.device) -> list[Tensor]:
    """Copy arrays over without waiting for it, as `to_device` does one: several in one transfer,
    written straight into the pinned memory it leaves from.

    Each starts on a multiple of 16 bytes: Triton compiles anew for a pointer that does not.
    """
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    starts = [0, *accumulate(sizes)]
    packed = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = torch.from_numpy(array.reshape(-1))
    # PyTorch keeps the pinned memory from being used again until the copy is over.
    there = packed.to(device, non_blocking=True)
    return [there[start:end] for start, end in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class Paged:
    """A layer as kernels take it; where there are no scales, pointers to something unread."""

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


def rows_of(x: Tensor) -> Tensor:
    """With the last dimension's numbers side by side, as every kernel reads them."""
    return x if x.stride(-1) == 1 else x.contiguous()

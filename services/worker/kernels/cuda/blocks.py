"""Copies between blocks and a staging buffer, in Triton."""

import torch
from torch import Tensor

from services.worker.kernels.cuda.copies import copy, dequantize, quantize
from services.worker.kernels.cuda.device import TYPES, require_runnable
from services.worker.kernels.cuda.tile_sizes import power_of_two
from services.worker.kv.cache import KVLayer
from services.worker.kv.copies import StagedLayer


class TritonBlocks:
    """BlockCopies on a CUDA device; on the CPU under TRITON_INTERPRET=1.

    Calls run on the current stream and do not wait for the device.
    """

    def __init__(self, device: torch.device):
        require_runnable(device)

    def gather(self, layer: KVLayer, blocks: Tensor, filled: Tensor, out: StagedLayer) -> None:
        if not len(blocks):
            return
        source, target = _by_block(layer.data), out.data
        if out.ranges is None:
            _copy(source, target, _scales(layer.scales), out.scales, blocks, gather=True)
            return
        quantize[_grid(target)](
            source, target, out.ranges, blocks, filled, target.shape[2],
            *_strides(source), *_strides(target), *_strides(out.ranges),
            **_sizes(source), NATIVE=TYPES[source.dtype],
        )  # fmt: skip

    def scatter(self, layer: KVLayer, blocks: Tensor, staged: StagedLayer) -> None:
        if not len(blocks):
            return
        source, target = staged.data, _by_block(layer.data)
        if staged.ranges is None:
            _copy(source, target, staged.scales, _scales(layer.scales), blocks, gather=False)
            return
        dequantize[_grid(source)](
            source, target, staged.ranges, blocks, source.shape[2],
            *_strides(source), *_strides(target), *_strides(staged.ranges),
            **_sizes(target), NATIVE=TYPES[target.dtype],
        )  # fmt: skip


def _copy(
    source: Tensor,
    target: Tensor,
    source_scales: Tensor | None,
    target_scales: Tensor | None,
    blocks: Tensor,
    gather: bool,
) -> None:
    scaled = source_scales is not None and target_scales is not None
    if source_scales is None or target_scales is None:
        source_scales, target_scales = source[..., 0], target[..., 0]  # unread
    copy[_grid(target if gather else source)](
        source, target, source_scales, target_scales, blocks, source.shape[2],
        *_strides(source), *_strides(target), *source_scales.stride(), *target_scales.stride(),
        **_sizes(source), GATHER=gather, SCALES=scaled,
    )  # fmt: skip


def _by_block(data: Tensor) -> Tensor:
    """Returns a view of [2, blocks, …] as [blocks, 2, …]."""
    return data.transpose(0, 1)


def _scales(scales: Tensor | None) -> Tensor | None:
    return None if scales is None else _by_block(scales)


def _grid(staged: Tensor) -> tuple[int]:
    n, kinds, kv_heads = staged.shape[:3]
    return (n * kinds * kv_heads,)


def _strides(x: Tensor) -> tuple[int, ...]:
    if x.stride(-1) != 1:
        raise ValueError("a staging buffer's heads must be contiguous")
    return x.stride()[:-1]


def _sizes(data: Tensor) -> dict[str, int]:
    block_tokens, head_dim = data.shape[3:]
    return {
        "BLOCK_TOKENS": block_tokens,
        "TOKENS": power_of_two(block_tokens),
        "HEAD_DIM": head_dim,
        "DIM": power_of_two(head_dim),
    }

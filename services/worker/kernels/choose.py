"""Which kernels serve a model here: by default Triton's on CUDA, PyTorch's anywhere else."""

import torch

from services.worker.cache import KVShape, bytes_per_token
from services.worker.engine_config import KernelSet
from services.worker.kernels.interface import AttentionKernels, BlockCopies
from services.worker.kernels.torch_attention import TorchAttention
from services.worker.kernels.torch_blocks import TorchBlocks

Kernels = tuple[AttentionKernels, BlockCopies]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernels_for(
    device: torch.device,
    block_tokens: int,
    dtype: torch.dtype,
    shapes: list[KVShape],
    heads: list[int] | None = None,
    int8: bool = False,
    chosen: KernelSet = "auto",
) -> Kernels:
    """Attention and block copies for a model's layers: `shapes` of KV, `heads` of queries (by
    default as many as of keys). `int8`: the cache itself is INT8.

    Raises ValueError, one sentence that says what to change, where no kernel takes a head size or
    dtype, or INT8 would save nothing. Windows and soft-caps are no such case, for INT8 is only
    how keys and values are stored; a model whose keys lose too much in it is found by
    `PagedModel.require_int8`.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f"the KV cache is kept in float32, bfloat16 or float16, not in {dtype}: "
            "set the worker's dtype to one of these"
        )
    if int8:
        _require_gain(shapes, dtype)
    triton = chosen == "triton" or (chosen == "auto" and device.type == "cuda")
    if not triton:
        token_bytes = max(bytes_per_token([shape], dtype) for shape in shapes)
        return TorchAttention(block_tokens, device, dtype, token_bytes), TorchBlocks()
    return _triton(device, block_tokens, dtype, shapes, heads or [s.kv_heads for s in shapes])


def _require_gain(shapes: list[KVShape], dtype: torch.dtype) -> None:
    native, int8 = bytes_per_token(shapes, dtype), bytes_per_token(shapes, dtype, int8=True)
    if int8 >= native:
        raise ValueError(
            f"kv_dtype int8 takes {int8} bytes a token with its scales and {dtype} only {native}, "
            f"for heads of {shapes[0].head_dim} are too small: set kv_dtype to auto"
        )


def _triton(
    device: torch.device,
    block_tokens: int,
    dtype: torch.dtype,
    shapes: list[KVShape],
    heads: list[int],
) -> Kernels:
    """Imported here, so that a machine without a GPU needs no Triton."""
    from services.worker.kernels.triton_sizes import require_supported

    for queries, shape in zip(heads, shapes, strict=True):
        require_supported(queries, shape.kv_heads, shape.head_dim, dtype)

    from services.worker.kernels.triton_attention import TritonAttention
    from services.worker.kernels.triton_blocks import TritonBlocks

    return TritonAttention(block_tokens, device, dtype), TritonBlocks(device)

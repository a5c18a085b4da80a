"""Selects the kernels for a model: by default Triton on CUDA, Numba on a CPU for float32 and
bfloat16, PyTorch elsewhere."""

from importlib.util import find_spec

import torch

from services.worker.config import KernelSet
from services.worker.kernels.interface import AttentionKernels, RecordableAttention, SamplingKernels
from services.worker.kernels.low_rank import LowRankProducts
from services.worker.kernels.reference.attention import TorchAttention
from services.worker.kernels.reference.blocks import TorchBlocks
from services.worker.kernels.reference.layer_ops import TorchLayerOps
from services.worker.kernels.reference.low_rank import TorchLowRank
from services.worker.kernels.reference.sampling import TorchSampling
from services.worker.kv.cache import KVCache, KVShape, bytes_per_token
from services.worker.kv.copies import BlockCopies

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
    threads: int = 0,
) -> Kernels:
    """Attention and block copies for a model's layers: `shapes` of KV, numbers of query `heads` (by
    default equal to those of keys). `int8`: the cache is INT8. `threads` is the limit for attention
    on a CPU; 0: PyTorch's.

    Raises ValueError, with a sentence that says what to change, if no kernel supports a head size
    or dtype, or INT8 would save nothing. INT8 supports windows and soft-caps, because it only
    changes how keys and values are stored; `PagedModel.require_int8` detects models that lose too
    much.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f"the KV cache supports float32, bfloat16 and float16, not {dtype}: "
            "set worker.dtype to one of these"
        )
    if int8:
        _require_gain(shapes, dtype)
    if runs_triton(device, chosen):
        return _triton(device, block_tokens, dtype, shapes, heads or [s.kv_heads for s in shapes])
    if chosen == "numba" or (chosen == "auto" and _suits_numba(device, dtype)):
        return _numba(device, block_tokens, dtype, shapes, int8, threads), TorchBlocks()
    token_bytes = max(bytes_per_token([shape], dtype) for shape in shapes)
    return TorchAttention(block_tokens, device, dtype, token_bytes), TorchBlocks()


def runs_triton(device: torch.device, chosen: KernelSet) -> bool:
    return chosen == "triton" or (chosen == "auto" and device.type == "cuda")


def recordable_for(
    device: torch.device, block_tokens: int, max_rows: int, row_blocks: int
) -> RecordableAttention:
    """Attention that can be recorded, for up to `max_rows` decodes of `row_blocks` blocks. Requires
    `runs_triton`."""
    from services.worker.kernels.cuda.recordable import RecordableDecodes

    return RecordableDecodes(block_tokens, device, max_rows, row_blocks)


def sampling_for(device: torch.device, chosen: KernelSet = "auto") -> SamplingKernels:
    """NumPy's and Numba's on a CPU, compiled now so that no step waits for it; else PyTorch's."""
    if device.type != "cpu" or chosen == "torch":
        return TorchSampling()
    from services.worker.kernels.cpu.sampling import CpuSampling

    draws = CpuSampling()
    draws.warm()
    return draws


def layer_ops_for(device: torch.device, dtype: torch.dtype) -> TorchLayerOps:
    """Numba's on a CPU in float32 and bfloat16, compiled or loaded now; else PyTorch's."""
    if not _suits_numba(device, dtype):
        return TorchLayerOps()
    # Imported here, because a worker on a GPU does not need Numba.
    from services.worker.kernels.cpu.layer_ops import NumbaLayerOps
    from services.worker.kernels.cpu.threads import wide_vectors

    ops = NumbaLayerOps(dtype, wide_vectors())
    ops.warm()
    return ops


def low_rank_for(device: torch.device, dtype: torch.dtype) -> LowRankProducts:
    """The products of adapters: Triton's on CUDA; Numba's on a CPU in float32 and bfloat16,
    compiled or loaded now; else PyTorch's."""
    if device.type == "cuda" and find_spec("triton"):
        from services.worker.kernels.cuda.low_rank import TritonLowRank

        return TritonLowRank(device)
    if not _suits_numba(device, dtype):
        return TorchLowRank()
    from services.worker.kernels.cpu.low_rank import NumbaLowRank

    products = NumbaLowRank()
    products.warm(dtype)
    return products


def _suits_numba(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)


def _numba(
    device: torch.device,
    block_tokens: int,
    dtype: torch.dtype,
    shapes: list[KVShape],
    int8: bool,
    threads: int,
) -> AttentionKernels:
    """Imports Numba here, because a worker on a GPU does not need it. Compiles the kernels for each
    head size, so that no step waits for it."""
    if not _suits_numba(device, dtype):
        raise ValueError(
            f"kernels numba supports a CPU with float32 or bfloat16, not {device.type} with "
            f"{dtype}: set kernels to auto"
        )
    from services.worker.kernels.cpu.attention import NumbaAttention

    token_bytes = max(bytes_per_token([shape], dtype) for shape in shapes)
    kernels = NumbaAttention(block_tokens, dtype, token_bytes, threads)
    sizes = list({shape.head_dim: shape for shape in shapes}.values())
    for layer in KVCache.allocate(sizes, 1, block_tokens, dtype, device, int8).layers:
        kernels.warm(layer, dtype)
    return kernels


def _require_gain(shapes: list[KVShape], dtype: torch.dtype) -> None:
    native, int8 = bytes_per_token(shapes, dtype), bytes_per_token(shapes, dtype, int8=True)
    if int8 >= native:
        raise ValueError(
            f"kv_dtype int8 with its scales takes {int8} bytes a token, {dtype} only {native}, "
            f"because heads of {shapes[0].head_dim} are too small: set kv_dtype to auto"
        )


def _triton(
    device: torch.device,
    block_tokens: int,
    dtype: torch.dtype,
    shapes: list[KVShape],
    heads: list[int],
) -> Kernels:
    """Imports Triton here, because a machine without a GPU does not need it."""
    from services.worker.kernels.cuda.tile_sizes import require_supported

    for queries, shape in zip(heads, shapes, strict=True):
        require_supported(queries, shape.kv_heads, shape.head_dim)

    from services.worker.kernels.cuda.attention import TritonAttention
    from services.worker.kernels.cuda.blocks import TritonBlocks

    return TritonAttention(block_tokens, device, dtype), TritonBlocks(device)

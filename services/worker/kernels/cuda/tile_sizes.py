"""What the Triton kernels support, and the tiles they work in."""

from dataclasses import dataclass

import torch

SMALLEST_HEAD, LARGEST_HEAD = 32, 256
LARGEST_GROUP = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# tl.dot wants 16 queries; a group of fewer heads is padded, which costs a decode nothing: it
# waits for memory, and the tensor cores do 16 rows in the time of one.
SMALLEST_DOT = 16


def require_supported(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """ValueError with a sentence that says what to change, where no kernel fits the model."""
    if dtype not in DTYPES:
        raise ValueError(
            f"the Triton kernels compute in float16, bfloat16 or float32, not {dtype}: "
            "set the worker's dtype to one of these"
        )
    if not SMALLEST_HEAD <= head_dim <= LARGEST_HEAD:
        raise ValueError(
            f"the Triton kernels take heads of {SMALLEST_HEAD} to {LARGEST_HEAD}, and this model "
            f"has heads of {head_dim}: set worker.kernels to torch"
        )
    if heads % kv_heads or heads // kv_heads > LARGEST_GROUP:
        raise ValueError(
            f"the Triton kernels share each key head among an equal number of query heads, "
            f"{LARGEST_GROUP} at most, and this model has {heads} query heads for {kv_heads} key "
            "heads: set worker.kernels to torch"
        )


def power_of_two(number: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel cuts its work: queries by keys, and what a thread block has to do it."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tiles(group: int, head_dim: int, dtype: torch.dtype, stored: torch.dtype) -> Tiles:
    """Tiles of 16 KiB of keys and of values: two or three thread blocks then share a
    multiprocessor of an A100 or H100, with 100 KiB and more of loads on their way, where the
    memory's latency asks for about 30. INT8 is bound by the instructions that widen it, fewest a
    key in large tiles on few warps. Products of float32 are made in registers, so there both
    sides of a tile stay small."""
    keys = 16384 // (power_of_two(head_dim) * stored.itemsize)
    queries = max(power_of_two(group), SMALLEST_DOT)
    if dtype.itemsize == 4:
        return Tiles(SMALLEST_DOT, min(max(keys, 16), 32), 4, 3)
    return Tiles(min(queries, 64), min(max(keys, 16), 128), 4, 3)


def prefill_tiles(head_dim: int, itemsize: int) -> Tiles:
    """Rows by keys as FlashAttention-2 cuts them. float32 has no tensor cores at full precision,
    so its tiles only have to fit."""
    dim = power_of_two(head_dim)
    if itemsize == 4:
        return Tiles(32, 32 if dim <= 128 else 16, 4, 2)
    if dim <= 64:
        return Tiles(128, 64, 4, 3)
    if dim <= 128:
        return Tiles(128, 64, 8, 3)
    return Tiles(64, 32, 4, 2)  # fits the 99 KiB of a consumer GPU, as all of these do

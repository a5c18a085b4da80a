"""The models that the Triton kernels support, and their tile sizes."""

from dataclasses import dataclass

import torch

SMALLEST_HEAD, LARGEST_HEAD = 32, 256
LARGEST_GROUP = 256

# tl.dot needs 16 queries. A group of fewer heads is padded, which does not slow a decode: it is
# bound by memory, and tensor cores compute 16 rows in the time of one.
SMALLEST_DOT = 16


def require_supported(heads: int, kv_heads: int, head_dim: int) -> None:
    """Raises ValueError, which says what to change, if no kernel supports the model."""
    if not SMALLEST_HEAD <= head_dim <= LARGEST_HEAD:
        raise ValueError(
            f"the Triton kernels support head sizes from {SMALLEST_HEAD} to {LARGEST_HEAD}, not "
            f"{head_dim}: set worker.kernels to torch"
        )
    if heads % kv_heads or heads // kv_heads > LARGEST_GROUP:
        raise ValueError(
            "the Triton kernels need an equal number of query heads per key head, at most "
            f"{LARGEST_GROUP}; this model has {heads} query heads and {kv_heads} key heads: set "
            "worker.kernels to torch"
        )


def power_of_two(number: int) -> int:
    """The least power of two that is not smaller than `number`."""
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Tiles:
    """A tile of queries by keys, and the warps and pipeline stages of a thread block."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tiles(group: int, head_dim: int, dtype: torch.dtype, stored: torch.dtype) -> Tiles:
    """Returns tiles of 16 KiB of keys and of values. Two or three thread blocks then share a
    multiprocessor of an A100 or H100, with 100 KiB or more of loads in flight; the memory's latency
    needs about 30 KiB. INT8 is bound by the instructions that widen it, which are fewest per key in
    large tiles on few warps. float32 products are computed in registers, so that its tiles are
    small."""
    keys = 16384 // (power_of_two(head_dim) * stored.itemsize)
    queries = max(power_of_two(group), SMALLEST_DOT)
    if dtype.itemsize == 4:
        return Tiles(SMALLEST_DOT, min(max(keys, 16), 32), 4, 3)
    return Tiles(min(queries, 64), min(max(keys, 16), 128), 4, 3)


def prefill_tiles(head_dim: int, itemsize: int) -> Tiles:
    """Returns rows by keys as in FlashAttention-2. float32 has no tensor cores at full precision,
    so its tiles only need to fit."""
    dim = power_of_two(head_dim)
    if itemsize == 4:
        return Tiles(32, 32 if dim <= 128 else 16, 4, 2)
    if dim <= 64:
        return Tiles(128, 64, 4, 3)
    if dim <= 128:
        return Tiles(128, 64, 8, 3)
    return Tiles(64, 32, 4, 2)  # fits the 99 KiB of a consumer GPU, as all of these do

"""The row counts for which decode steps are recorded, and the condition for graphs."""

import torch

from services.worker.config import EngineConfig
from services.worker.kernels.selection import runs_triton

SMALL = (1, 2, 4)
# Rows between two sizes: at most an eighth of a step is padding, and 7 rows below 128.
STEP_ROWS = 8
# Blocks per row: 262,144 tokens in blocks of 16. Batches with longer rows run eagerly.
ROW_BLOCKS_MAX = 16_384


def graphs_wanted(config: EngineConfig, device: torch.device) -> bool:
    """Whether decode steps are recorded. Raises ValueError with a sentence if graphs are configured
    but unavailable."""
    possible = device.type == "cuda" and runs_triton(device, config.kernels)
    if config.cuda_graphs == "on" and device.type != "cuda":
        raise ValueError(
            f"cuda_graphs on needs a CUDA device, and this worker runs on {device}: set it to auto"
        )
    if config.cuda_graphs == "on" and not possible:
        raise ValueError(
            f"cuda_graphs on needs the Triton kernels, and kernels is {config.kernels}: set it to "
            "auto"
        )
    return possible and config.cuda_graphs != "off"


def recorded_sizes(max_rows: int) -> list[int]:
    """Ascending: 1, 2, 4, then every 8 rows to 128, every 16 to 256, and so on; `max_rows` last."""
    sizes, size = [*SMALL], STEP_ROWS
    while size < max_rows:
        sizes.append(size)
        size += max(STEP_ROWS, 1 << (size.bit_length() - 4))
    return [*(size for size in sizes if size < max_rows), max_rows]


def recording_order(sizes: list[int]) -> list[int]:
    """The sizes in the order of recording: the largest, because the others reuse its memory; then
    powers of two before the sizes in between, because time or memory may run out."""
    largest, powers = sizes[-1:], [size for size in sizes[:-1] if size & (size - 1) == 0]
    between = [size for size in sizes[:-1] if size & (size - 1)]
    return [*largest, *reversed(powers), *reversed(between)]


def next_larger_sizes(sizes: list[int], max_rows: int) -> list[int | None]:
    """For each number of rows from 0 to `max_rows`, the smallest of `sizes` that holds them."""
    return [next((s for s in sorted(sizes) if s >= n > 0), None) for n in range(max_rows + 1)]

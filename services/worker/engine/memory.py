"""Sizes of the KV pools: on the device, and in host memory."""

from collections.abc import Sequence

import torch

from services.worker.config import EngineConfig
from services.worker.engine.graphs.sizes import ROW_BLOCKS_MAX
from services.worker.kv.cache import bytes_per_token
from services.worker.kv.capacity import KVMemory
from services.worker.machine import free_host_bytes, step_token_limit
from services.worker.model.paged import PagedModel

CPU_KV_TOKENS = 65_536  # more than one CPU decodes at a useful speed
FREE_SHARE = 0.25  # of the free host memory, without a configured size
HOST_BYTES = 4 * 2**30  # upper limit without a configured size
STAGING_BYTES = {"cuda": 128 * 2**20, "cpu": 16 * 2**20}  # 5 ms of a PCIe 4.0 link; a CPU's caches
DIRECTIONS = 2  # staging exists in both directions
# Memory that the driver keeps for one recorded step of some hundred kernels: a conservative guess,
# not measured. All steps share the memory for partial results of attention.
GRAPH_BYTES = 8 * 2**20
PARTIALS_BYTES = 32 * 2**20


def kv_blocks(model: PagedModel, settings: EngineConfig, graphs_bytes: int = 0) -> int:
    """Blocks to allocate: as configured, or what is free after `graphs_bytes`. Raises ValueError if
    that is too few."""
    token_bytes = bytes_per_token(model.shapes, model.dtype, settings.kv_dtype == "int8")
    memory = kv_memory(model, settings, token_bytes, graphs_bytes)
    fitting = memory.tokens
    if model.device.type == "cpu":
        fitting = min(CPU_KV_TOKENS, int(fitting * FREE_SHARE))
    tokens = settings.kv_tokens or fitting
    if tokens > memory.tokens:
        raise ValueError(
            f"kv_tokens {tokens} need {tokens * token_bytes / 2**20:.0f} MiB of KV cache "
            f"({token_bytes} bytes a token), but only {memory.available_bytes / 2**20:.0f} MiB are "
            f"free; set it to at most {memory.tokens}"
        )
    if tokens < settings.block_tokens:
        raise ValueError(
            f"a KV cache of {tokens} tokens is smaller than one block of {settings.block_tokens}: "
            "set kv_tokens higher or block_tokens lower, or free memory"
        )
    return tokens // settings.block_tokens


def host_blocks(
    settings: EngineConfig, record_bytes: int, kv_bytes: int = 0, most_blocks: int | None = None
) -> int:
    """Blocks of `record_bytes` for host memory, at most `most_blocks` without a configured size.
    With several ranks, this rank's part.

    `kv_bytes` of the free memory are reserved for a CPU's KV cache, which takes its memory only
    when written. Raises ValueError if the configured pool does not fit into the free memory or is
    smaller than a block.
    """
    free_bytes = _free_host_bytes(settings) - kv_bytes
    if settings.host_gib is None:
        most_bytes = min(int(free_bytes * FREE_SHARE), HOST_BYTES // settings.tensor_parallel)
        fitting = most_bytes // record_bytes
        return max(0, fitting if most_blocks is None else min(fitting, most_blocks))
    pool_bytes = int(settings.host_gib * 2**30) // settings.tensor_parallel
    if pool_bytes > free_bytes:
        raise ValueError(
            f"host_gib {settings.host_gib:g}: the host pool of {pool_bytes / 2**30:.2f} GiB is "
            f"larger than the {free_bytes / 2**30:.2f} GiB of free host memory; make it smaller"
        )
    if 0 < pool_bytes < record_bytes:
        raise ValueError(
            f"host_gib {settings.host_gib:g}: the host pool of {pool_bytes} bytes is smaller than "
            f"one block of {record_bytes} bytes; make it larger, or 0 for none"
        )
    return pool_bytes // record_bytes


def _free_host_bytes(settings: EngineConfig) -> int:
    """This rank's share of what is free, because all ranks ask before any of them allocates."""
    return free_host_bytes() // settings.tensor_parallel


def staging_bytes(device: torch.device) -> int:
    """Bytes of one direction's staging ring."""
    return STAGING_BYTES[device.type]


def kv_memory(
    model: PagedModel, settings: EngineConfig, token_bytes: int, graphs_bytes: int = 0
) -> KVMemory:
    """KV memory of the device with the model loaded. On a GPU the engine's part is measured."""
    # On a CPU the free memory already excludes the model, and steps need little.
    if model.device.type == "cpu":
        return KVMemory(_free_host_bytes(settings), 0, 0, token_bytes)
    free, total = torch.cuda.mem_get_info(model.device)
    staging = DIRECTIONS * staging_bytes(model.device)
    batch_tokens = step_token_limit(settings.max_batch_tokens, model.device)
    return KVMemory(
        capacity_bytes=int(total * settings.gpu_memory_utilization),
        model_bytes=total - free,
        engine_bytes=staging + _forward_bytes(model, batch_tokens) + graphs_bytes,
        token_bytes=token_bytes,
    )


def graphs_bytes(model: PagedModel, sizes: Sequence[int]) -> int:
    """Memory of decode steps recorded for these row counts: workspace, inputs and logits of the
    largest, and what the driver keeps of each. Not counted on a CPU."""
    if model.device.type == "cpu" or not sizes:
        return 0
    rows = max(sizes)
    row_bytes = model.vocab_size * model.dtype.itemsize + 4 * ROW_BLOCKS_MAX
    shared = _forward_bytes(model, rows) + rows * row_bytes + PARTIALS_BYTES
    return shared + len(sizes) * GRAPH_BYTES


def _forward_bytes(model: PagedModel, tokens: int) -> int:
    """Memory of one forward of this many tokens and their logits, measured."""
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    model.forward_alone(min(tokens, model.max_context_tokens))
    return torch.cuda.max_memory_allocated(model.device) - before

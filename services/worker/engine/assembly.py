"""What an engine is put together of, sized to the machine: memory in two pools, and kernels."""

from dataclasses import dataclass, replace

from services.worker.config import EngineConfig
from services.worker.engine.memory import host_blocks, kv_blocks, staging_bytes
from services.worker.engine.ranks import ALONE, Ranks
from services.worker.kernels.choose import kernels_for
from services.worker.kernels.interface import AttentionKernels
from services.worker.kv.cache import KVCache, bytes_per_token
from services.worker.kv.copies import BlockCopies
from services.worker.kv.device_streams import streams_for
from services.worker.kv.host_cache import HostCache
from services.worker.kv.staging import RecordLayout, RingSize
from services.worker.kv.swapper import Swapper
from services.worker.machine import batch_tokens_of, free_host_bytes
from services.worker.model.paged import PagedModel
from services.worker.model.rope import settle_rope
from services.worker.requests.state import Limits

HOST_BLOCKS = 8  # resting for each on the device, where no size is set: more would wait for ever


@dataclass(frozen=True)
class Parts:
    """Limits of the state, and all that is allocated within them."""

    limits: Limits
    cache: KVCache
    kernels: AttentionKernels
    swapper: Swapper
    kv_bytes_per_token: int


def assemble(model: PagedModel, config: EngineConfig, ranks: Ranks = ALONE) -> Parts:
    """Raises ValueError, one sentence that says what to change, for a rope that depends on the
    batch, and for what the attention or this machine's memory has no room for."""
    limit = model.max_context_tokens
    context_tokens = min(limit, config.max_context_tokens or limit)
    settle_rope(model.module, context_tokens)
    int8 = config.kv_dtype == "int8"
    kernels, copies = kernels_for(
        model.device,
        config.block_tokens,
        model.dtype,
        model.shapes,
        model.heads,
        int8,
        config.kernels,
    )
    if int8:
        model.require_int8()
    layout = RecordLayout(
        tuple(model.shapes), config.block_tokens, model.dtype, int8, config.swap_dtype == "int8"
    )
    token_bytes = bytes_per_token(model.shapes, model.dtype, int8)
    limits = _limits(model, config, layout, token_bytes, context_tokens, ranks)
    cache = KVCache.allocate(
        model.shapes, limits.kv_blocks, config.block_tokens, model.dtype, model.device, int8
    )
    host = _host(model, config, layout, limits.host_blocks, ranks.size > 1)
    if ranks.size > 1:  # what one has no room for, none may count on
        limits = replace(limits, host_blocks=ranks.least(host.capacity))
    swapper = _swapper(cache, copies, layout, host)
    return Parts(limits, cache, kernels, swapper, token_bytes)


def _limits(
    model: PagedModel,
    config: EngineConfig,
    layout: RecordLayout,
    token_bytes: int,
    context_tokens: int,
    ranks: Ranks,
) -> Limits:
    blocks = ranks.least(kv_blocks(model, config))
    in_host = model.device.type == "cpu"  # the cache itself is in host memory
    kv_bytes = blocks * config.block_tokens * token_bytes if in_host else 0
    return Limits(
        kv_blocks=blocks,
        block_tokens=config.block_tokens,
        max_running=config.max_running,
        max_batch_tokens=batch_tokens_of(config.max_batch_tokens, model.device),
        max_context_tokens=context_tokens,
        report_every_steps=config.report_every_steps,
        eos_ids=model.eos_ids,
        host_blocks=ranks.least(
            host_blocks(config, layout.record_bytes, kv_bytes, HOST_BLOCKS * blocks)
        ),
        exact_swaps=layout.exact,
        prefix_sharing=config.prefix_sharing,
    )


def _host(
    model: PagedModel, config: EngineConfig, layout: RecordLayout, blocks: int, shared: bool
) -> HostCache:
    """Made at start where it is pinned, which takes too long to do between two steps, or `shared`
    with other ranks, which must have as much. A size that was set must be had; of the default,
    what there is."""
    pinned = model.device.type == "cuda"
    host = HostCache(blocks, layout.record_bytes, free_host_bytes, pinned)
    if (pinned or shared) and config.host_gib is not None:
        host.require()
    elif pinned or shared:
        host.ensure(blocks)
    return host


def _swapper(cache: KVCache, copies: BlockCopies, layout: RecordLayout, host: HostCache) -> Swapper:
    device = cache.layers[0].data.device
    ring = RingSize.within(staging_bytes(device), layout.record_bytes)
    return Swapper(cache.layers, copies, layout, host, streams_for(device), ring)

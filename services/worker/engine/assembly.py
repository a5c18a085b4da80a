"""Assembles an engine's parts, sized to the machine: KV pools, kernels, sampler and recorder."""

from dataclasses import dataclass, replace

import torch

from services.worker.config import EngineConfig
from services.worker.engine.graphs.decode_graphs import GraphParts
from services.worker.engine.graphs.recorder import CudaRecorder, Recorder
from services.worker.engine.graphs.sizes import ROW_BLOCKS_MAX, graphs_wanted, recorded_sizes
from services.worker.engine.memory import graphs_bytes, host_blocks, kv_blocks, staging_bytes
from services.worker.engine.ranks import SINGLE_RANK, Ranks
from services.worker.engine.sampling.grammar_masks import GrammarMasks
from services.worker.engine.sampling.grammars import Grammars
from services.worker.engine.sampling.sampler import Sampler
from services.worker.engine.step_clock import StepClock
from services.worker.kernels.interface import AttentionKernels
from services.worker.kernels.selection import kernels_for, recordable_for, sampling_for
from services.worker.kv.cache import KVCache, bytes_per_token
from services.worker.kv.device_streams import streams_for
from services.worker.kv.host_cache import HostCache
from services.worker.kv.staging import RecordLayout, RingSize
from services.worker.kv.swapper import Swapper
from services.worker.machine import cores_per_worker, free_host_bytes, step_token_limit
from services.worker.model.paged import PagedModel
from services.worker.model.rope import freeze_rope
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.lookup import DraftLimits

# Bytes of the logits that score prompts in one step, in the model's dtype: 500 to 900 tokens of a
# vocabulary of 150,000. On a GPU the logits of a full batch are reserved in any case.
SCORED_BYTES = 256 * 2**20
MAX_MASK_THREADS = 8
HOST_BLOCKS = 8  # per device block, without a configured size; KV of more would wait too long


@dataclass(frozen=True)
class Parts:
    """The limits of the state, and everything allocated within them. `graphs` is None unless decode
    steps are recorded."""

    limits: Limits
    cache: KVCache
    kernels: AttentionKernels
    swapper: Swapper
    clock: StepClock
    graphs: GraphParts | None
    sampler: Sampler
    grammars: Grammars
    grammar_masks: GrammarMasks
    kv_bytes_per_token: int
    host_block_bytes: int


def assemble(model: PagedModel, config: EngineConfig, ranks: Ranks = SINGLE_RANK) -> Parts:
    """Raises ValueError, with a sentence that says what to change, if the model's rope depends on
    the batch, no kernel supports its attention, or memory is short."""
    limit = model.max_context_tokens
    context_tokens = min(limit, config.max_context_tokens or limit)
    freeze_rope(model.module, context_tokens)
    int8 = config.kv_dtype == "int8"
    kernels, copies = kernels_for(
        model.device,
        config.block_tokens,
        model.dtype,
        model.shapes,
        model.heads,
        int8,
        config.kernels,
        config.torch_threads or cores_per_worker(config.local_workers * ranks.size),
    )
    if int8:
        model.require_int8()
    layout = RecordLayout(
        tuple(model.shapes), config.block_tokens, model.dtype, int8, config.swap_dtype == "int8"
    )
    token_bytes = bytes_per_token(model.shapes, model.dtype, int8)
    recorder = recorder_for(config, model.device)
    max_rows = min(config.max_running, step_token_limit(config.max_batch_tokens, model.device))
    sizes = recorded_sizes(max_rows) if recorder else []
    set_aside = graphs_bytes(model, sizes)
    limits = _limits(model, config, layout, token_bytes, context_tokens, set_aside, ranks)
    # One block beyond the pool: the padding of recorded steps writes there.
    blocks = limits.kv_blocks + bool(recorder)
    cache = KVCache.allocate(
        model.shapes, blocks, config.block_tokens, model.dtype, model.device, int8
    )
    host = _host(model, config, layout, limits.host_blocks, ranks.size > 1)
    if ranks.size > 1:  # all ranks use the smallest size of any rank
        limits = replace(limits, host_blocks=ranks.all_reduce_min(host.capacity))
    streams = streams_for(model.device)
    ring = RingSize.within(staging_bytes(model.device), layout.record_bytes)
    swapper = Swapper(cache.layers, copies, layout, host, streams, ring)
    graphs = _graphs(model, cache, limits, recorder, set_aside) if recorder else None
    draws = sampling_for(model.device, config.kernels)
    sampler = Sampler(model.device, model.vocab_size, model.eos_ids, draws, streams)
    grammars = Grammars(config.model, model.vocab_size, model.eos_ids, config.grammar_limit_s)
    return Parts(
        limits=limits,
        cache=cache,
        kernels=kernels,
        swapper=swapper,
        clock=StepClock(streams),
        graphs=graphs,
        sampler=sampler,
        grammars=grammars,
        grammar_masks=GrammarMasks(grammars, _mask_threads(config, model.device)),
        kv_bytes_per_token=token_bytes,
        host_block_bytes=layout.record_bytes,
    )


def _mask_threads(config: EngineConfig, device: torch.device) -> int:
    """Threads that fill the masks of grammars: on a CPU the others compute the model."""
    if device.type == "cpu":
        return 1
    share = cores_per_worker(config.local_workers * config.tensor_parallel)
    return max(1, min(share // 2, MAX_MASK_THREADS))


def recorder_for(config: EngineConfig, device: torch.device) -> Recorder | None:
    """The recorder of decode steps; None if they are not recorded."""
    return CudaRecorder(device) if graphs_wanted(config, device) else None


def _graphs(
    model: PagedModel, cache: KVCache, limits: Limits, recorder: Recorder, set_aside: int
) -> GraphParts:
    # Every row has a block or more, so that a step has no more rows than the pool has blocks.
    rows = min(limits.max_running, limits.max_batch_tokens, limits.kv_blocks)
    row_blocks = min(-(-limits.reach_tokens // limits.block_tokens), ROW_BLOCKS_MAX)
    return GraphParts(
        model=model,
        cache=cache,
        attention=recordable_for(model.device, limits.block_tokens, rows, row_blocks),
        recorder=recorder,
        sizes=recorded_sizes(rows),
        pad_block=limits.kv_blocks,
        blocks=limits.kv_blocks,
        limit_bytes=set_aside,
    )


def _limits(
    model: PagedModel,
    config: EngineConfig,
    layout: RecordLayout,
    token_bytes: int,
    context_tokens: int,
    set_aside: int,
    ranks: Ranks,
) -> Limits:
    blocks = ranks.all_reduce_min(kv_blocks(model, config, set_aside))
    in_host = model.device.type == "cpu"  # the cache itself is in host memory
    kv_bytes = blocks * config.block_tokens * token_bytes if in_host else 0
    return Limits(
        kv_blocks=blocks,
        block_tokens=config.block_tokens,
        max_running=config.max_running,
        max_batch_tokens=step_token_limit(config.max_batch_tokens, model.device),
        max_context_tokens=context_tokens,
        report_every_steps=config.report_every_steps,
        eos_ids=model.eos_ids,
        host_blocks=ranks.all_reduce_min(
            host_blocks(config, layout.record_bytes, kv_bytes, HOST_BLOCKS * blocks)
        ),
        exact_swaps=layout.exact,
        prefix_sharing=config.prefix_sharing,
        drafts=DraftLimits(
            config.speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max
        ),
        grammars=True,
        adapters=True,
        adapter_slots=config.most_adapters_on_device,
        adapter_turn_steps=config.adapter_turn_steps,
        max_scored_tokens=max(1, SCORED_BYTES // (model.vocab_size * model.dtype.itemsize)),
    )


def _host(
    model: PagedModel, config: EngineConfig, layout: RecordLayout, blocks: int, shared: bool
) -> HostCache:
    """The host pool. It is allocated now if it is pinned, which takes too long between two steps,
    or if all ranks must have the same size (`shared`). A configured size must be available; a
    default size is reduced to what is free."""
    pinned = model.device.type == "cuda"
    host = HostCache(blocks, layout.record_bytes, free_host_bytes, pinned)
    if (pinned or shared) and config.host_gib is not None:
        host.require()
    elif pinned or shared:
        host.ensure(blocks)
    return host

"""vLLM's messages about a prefix cache, as msgpack (vllm/distributed/kv_events.py, vLLM 0.30 to
0.32): llm-d, Dynamo and other routers read them."""

from collections.abc import Iterator
from itertools import groupby

import msgspec

from services.runtime.prefix import hash_of
from services.worker.kv.prefixes import StoredBlocks

DEVICE = "GPU"  # the first tier of memory, on a CPU, too


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Successive blocks of a text that the cache now has, with all tokens of the blocks."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None  # what a block's hash includes, too


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float  # seconds since 1970
    events: list[KVEvent]
    data_parallel_rank: int


def stored_events(stored: StoredBlocks, block_tokens: int) -> Iterator[BlockStored]:
    """One event for each run of successive blocks, in ascending order."""
    indexes, keys, tokens, cache_salt, adapter = stored

    def extra(index: int) -> tuple[str, ...] | None:
        return tuple(filter(None, (adapter, "" if index else cache_salt))) or None

    for _, run in groupby(enumerate(indexes), lambda each: each[1] - each[0]):
        blocks = [index for _, index in run]
        first, end = blocks[0], blocks[-1] + 1
        extras = [extra(index) for index in blocks]
        yield BlockStored(
            block_hashes=[block_hash(key) for key in keys[first:end]],
            parent_block_hash=block_hash(keys[first - 1]) if first else None,
            token_ids=list(tokens[first * block_tokens : end * block_tokens]),
            block_size=block_tokens,
            lora_id=None,
            medium=DEVICE,
            lora_name=adapter or None,
            extra_keys=extras if any(extras) else None,
        )


def block_hash(key: bytes) -> int:
    return hash_of(key) % 2**64  # vLLM's hashes are unsigned

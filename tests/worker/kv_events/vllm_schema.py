"""vLLM's messages as a subscriber declares them, and a subscriber that keeps what the cache has.

The structures have the fields of vllm/distributed/kv_events.py of vLLM 0.32.
"""

from typing import Any

import msgspec
import zmq

Hash = bytes | int
TIMEOUT_MS = 20_000
POLL_MS = 1_000


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Subscriber:
    """Receives batches, from the replay endpoint first and then as they are published, and keeps
    the cached texts: the tokens up to the end of each block, by hash."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = ""):
        self._context = zmq.Context()
        self._published = self._context.socket(zmq.SUB)
        self._published.subscribe(topic)
        self._published.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)
        for socket in (self._published, self._replay):
            socket.rcvtimeo = TIMEOUT_MS
            socket.linger = 0
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.next = 0
        self.cleared = 0
        self.texts: dict[Hash, tuple[int, ...]] = {}
        self.extras: dict[Hash, Any] = {}

    def close(self) -> None:
        self._context.destroy()

    def receive(self) -> list[KVEventBatch]:
        """The next published batch, or the kept ones if it is another or none comes: what is
        published before the subscription arrives is lost."""
        while self._published.poll(POLL_MS):
            _, number, payload = self._published.recv_multipart()
            seq = int.from_bytes(number, "big")
            if seq > self.next:
                break
            if seq == self.next:
                return [self._take(seq, payload)]
        return self.catch_up()

    def catch_up(self) -> list[KVEventBatch]:
        """The batches from `next` on, as far as the publisher has them."""
        self._replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        batches: list[KVEventBatch] = []
        while True:
            _, _, number, payload = self._replay.recv_multipart()
            seq = int.from_bytes(number, "big", signed=True)
            if seq < 0:
                return batches
            batches.append(self._take(seq, payload))

    def _take(self, seq: int, payload: bytes) -> KVEventBatch:
        self.next = seq + 1
        batch = self._decoder.decode(payload)
        for event in batch.events:
            self._apply(event)
        return batch

    def _apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        match event:
            case BlockStored():
                text = self.texts[event.parent_block_hash] if event.parent_block_hash else ()
                size = event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                for index, name in enumerate(event.block_hashes):
                    text += tuple(event.token_ids[index * size : (index + 1) * size])
                    assert name not in self.texts, "a block is stored twice"
                    self.texts[name] = text
                    self.extras[name] = event.extra_keys and event.extra_keys[index]
            case BlockRemoved():
                for name in event.block_hashes:
                    del self.texts[name]
            case AllBlocksCleared():
                self.cleared += 1
                self.texts.clear()

"""Publishes which blocks a worker's prefix cache has, as vLLM does, for routers that place requests
by it.

    engine's thread ─events─▶ bounded queue ─▶ event loop ─batches─▶ PUB socket, ROUTER for replay

A batch is three frames: topic, number (8 bytes, big-endian), msgpack. The first batch says that the
cache is empty. A number that is left out tells a subscriber that it misses events, and one that is
lower than before that the worker has restarted. To the replay endpoint it sends an empty frame and
a number, and receives the batches from there on, as far as they are kept, then one numbered -1.
"""

import asyncio
import logging
import time
from collections import deque

import msgspec
import zmq.asyncio

from services.worker.config import EngineConfig
from services.worker.kv.prefixes import StoredBlocks
from services.worker.kv_events.messages import (
    DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    EventBatch,
    KVEvent,
    block_hash,
    stored_events,
)

log = logging.getLogger(__name__)

BATCH_EVENTS = 1_024  # of one message
REPLAYED_BATCHES, REPLAYED_BYTES = 10_000, 2**26  # kept
END = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """A `PrefixListener`, called by the engine's thread; `run` publishes in the event loop."""

    def __init__(self, config: EngineConfig):
        """Binds or connects the sockets. Raises ValueError with a sentence if that fails."""
        self._block_tokens = config.block_tokens
        self._rank = config.local_rank
        self._topic = config.kv_events_topic.encode()
        self._limit = config.kv_events_queue
        self._queue: deque[KVEvent] = deque([AllBlocksCleared()])
        self.dropped = 0  # events
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = asyncio.Event()
        self._next = 0
        self._sent: deque[tuple[int, bytes]] = deque()
        self._sent_bytes = 0
        self._context = zmq.asyncio.Context()
        self._publishing = self._open(zmq.PUB, "kv_events_endpoint", config)
        self._replaying: zmq.asyncio.Socket | None = None
        if config.kv_events_replay_endpoint:
            self._replaying = self._open(zmq.ROUTER, "kv_events_replay_endpoint", config)

    def _open(self, kind: int, setting: str, config: EngineConfig) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.sndhwm = REPLAYED_BATCHES + 1  # messages that wait for a subscriber; the next drop
        endpoint = offset_endpoint(getattr(config, setting), config.local_rank)
        try:
            (socket.bind if binds(endpoint) else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"worker.{setting}: {endpoint} cannot be used: {error}") from error
        log.info("KV events on %s", endpoint)
        return socket

    # The engine's thread

    def stored(self, blocks: StoredBlocks) -> None:
        for event in stored_events(blocks, self._block_tokens):
            self._put(event)

    def removed(self, key: bytes) -> None:
        self._put(BlockRemoved([block_hash(key)], DEVICE))

    def cleared(self) -> None:
        self._put(AllBlocksCleared())

    def _put(self, event: KVEvent) -> None:
        if len(self._queue) >= self._limit:
            self.dropped += 1
            return
        self._queue.append(event)
        if self._loop and not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._ready.set)

    # The event loop

    async def run(self) -> None:
        """Publishes until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publish())
                if self._replaying:
                    tasks.create_task(self._replay(self._replaying))
        finally:
            self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def _publish(self) -> None:
        pack, dropped = msgspec.msgpack.Encoder().encode, 0
        while True:
            await self._ready.wait()
            self._ready.clear()
            self._woken = False
            while self._queue:
                count = min(len(self._queue), BATCH_EVENTS)
                events = [self._queue.popleft() for _ in range(count)]
                payload = pack(EventBatch(time.time(), events, self._rank))
                number, self._next = self._next, self._next + 1
                self._keep(number, payload)
                frames = (self._topic, number.to_bytes(8, "big"), payload)
                await self._publishing.send_multipart(frames)
            if self.dropped != dropped:
                dropped, self._next = self.dropped, self._next + 1  # a gap tells subscribers

    def _keep(self, number: int, payload: bytes) -> None:
        self._sent.append((number, payload))
        self._sent_bytes += len(payload)
        while len(self._sent) > REPLAYED_BATCHES or self._sent_bytes > REPLAYED_BYTES:
            self._sent_bytes -= len(self._sent.popleft()[1])

    async def _replay(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            match await socket.recv_multipart():
                case [client, b"", first] if len(first) == len(END):
                    for number, payload in list(self._sent):
                        if number >= int.from_bytes(first, "big"):
                            frames = (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                            await socket.send_multipart(frames)
                    await socket.send_multipart((client, b"", b"", END, b""))
                case frames:
                    log.warning("a replay request has %d frames, not a number", len(frames))


def binds(endpoint: str) -> bool:
    """Whether an endpoint is bound, as in vLLM: else it is the address of one that is bound."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def offset_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of a machine's worker `rank`: a bound one needs a port, or a name, of its
    own."""
    if not rank or not binds(endpoint):
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"

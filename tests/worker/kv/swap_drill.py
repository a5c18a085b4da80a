"""Drill: random offloads, uploads, recalls and reuse of blocks on a deferred device.

It replaces the worker's state by a dict of what each request's KV must be, and overwrites all free
blocks. `run` returns the requests with KV that differs from it.
"""

from random import Random

import torch
from torch import Tensor

from services.costs import Direction
from services.worker.kernels.reference.blocks import TorchBlocks
from services.worker.kv.cache import KVCache, KVLayer, KVShape
from services.worker.kv.device_streams import Lane
from services.worker.kv.host_cache import HostCache
from services.worker.kv.staging import RecordLayout, RingSize
from services.worker.kv.swapper import Swapper
from services.worker.kv.transfers import KVTransfer, TransferPlan
from tests.worker.kv.deferred_streams import DeferredCopies, DeferredStreams, Missing

BLOCK, DEVICE_BLOCKS, HOST_BLOCKS, MOST_BLOCKS = 4, 10, 9, 5
SHAPES = (KVShape(2, 8), KVShape(1, 4))
LAYOUTS = {
    "native": RecordLayout(SHAPES, BLOCK, torch.bfloat16),
    "int8 at rest": RecordLayout(SHAPES, BLOCK, torch.float32, swap_int8=True),
    "int8 live": RecordLayout(SHAPES, BLOCK, torch.bfloat16, kv_int8=True, swap_int8=True),
}


def empty_layers(layout: RecordLayout, blocks: int) -> list[KVLayer]:
    shapes, device = list(layout.shapes), torch.device("cpu")
    return KVCache.allocate(
        shapes, blocks, layout.block_tokens, layout.dtype, device, int8=layout.kv_int8
    ).layers


def tensors(layers: list[KVLayer]) -> list[Tensor]:
    return [t for layer in layers for t in (layer.data, layer.scales) if t is not None]


def random_layers(layout: RecordLayout, blocks: int, chance: Random) -> list[KVLayer]:
    layers = empty_layers(layout, blocks)
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    for tensor in tensors(layers):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 50)
    return layers


def write(layers: list[KVLayer], blocks: list[int], content: list[KVLayer]) -> None:
    for into, tensor in zip(tensors(layers), tensors(content), strict=True):
        into[:, blocks] = tensor


def holds(layers: list[KVLayer], blocks: list[int], content: list[KVLayer], tokens: int) -> bool:
    """Whether the first `tokens` tokens of `blocks` are those of `content`."""
    return all(
        torch.equal(_tokens(ours[:, blocks])[:tokens], _tokens(theirs)[:tokens])
        for ours, theirs in zip(tensors(layers), tensors(content), strict=True)
    )


def _tokens(tensor: Tensor) -> Tensor:
    """[2, blocks, kv_heads, block_tokens, …] → [blocks · block_tokens, …]"""
    return tensor.movedim(0, 2).movedim(3, 1).flatten(0, 1)


def filled_tokens(tokens: int) -> Tensor:
    return torch.tensor([min(BLOCK, tokens - first) for first in range(0, tokens, BLOCK)])


def there_and_back(layout: RecordLayout, content: list[KVLayer], tokens: int) -> list[KVLayer]:
    """The content after an offload and an upload."""
    blocks = torch.arange(-(-tokens // BLOCK))
    records = torch.empty(len(blocks), layout.record_bytes, dtype=torch.uint8)
    result = empty_layers(layout, len(blocks))
    for layer, staged, back in zip(content, layout.layer_views(records), result, strict=True):
        TorchBlocks().gather(layer, blocks, filled_tokens(tokens), staged)
        TorchBlocks().scatter(back, blocks, staged)
    return result


class Drill:
    """`turn` is one step of an engine: settle, change residencies, start the moves, compute."""

    def __init__(self, seed: int, layout: RecordLayout, missing: Missing | None = None):
        self.chance = Random(seed)
        self.layout = layout
        self.streams = DeferredStreams(Random(seed), missing)
        self.layers = empty_layers(layout, DEVICE_BLOCKS)
        record_bytes = layout.record_bytes
        host = HostCache(HOST_BLOCKS, record_bytes, lambda: 2**40, slab_bytes=4 * record_bytes)
        ring = RingSize(self.chance.randint(1, 3), self.chance.randint(1, 2))
        copies = DeferredCopies(TorchBlocks(), self.streams)
        self.swapper = Swapper(self.layers, copies, layout, host, self.streams, ring)
        self.free = list(range(DEVICE_BLOCKS))
        self.host_free = list(range(HOST_BLOCKS))
        self.content: dict[str, list[KVLayer]] = {}
        self.tokens: dict[str, int] = {}
        self.here: dict[str, list[int]] = {}  # on the device, readable
        self.in_host: dict[str, list[int]] = {}  # in host memory, also while it is uploaded
        self.uploading: dict[int, tuple[str, list[int]]] = {}
        self.serials = 0
        self.finished = 0  # moves
        self.wrong: list[str] = []

    def run(self, turns: int = 40) -> list[str]:
        for _ in range(turns):
            self.turn()
        self.drain()
        return self.wrong

    def turn(self) -> None:
        if self.chance.random() < 0.2:
            self.swapper.wait()
        self.settle()
        if self.chance.random() < 0.02:
            self.reset()
        self.started: list[KVTransfer] = []
        self.recalled: list[int] = []
        self.fresh: list[str] = []
        actions = [self.begin, self.offload, self.offload, self.upload, self.upload]
        for action in self.chance.choices([*actions, self.recall, self.drop], k=4):
            action()
        assert not self.swapper.start(TransferPlan(tuple(self.started), tuple(self.recalled)))
        self.compute()
        self.streams.pass_time()

    # Changes of the state between two steps

    def begin(self) -> None:
        blocks = self.take(self.free, self.chance.randint(1, MOST_BLOCKS))
        if blocks:
            self.serials += 1
            name = f"r{self.serials}"
            self.here[name] = blocks
            self.tokens[name] = len(blocks) * BLOCK - self.chance.randrange(BLOCK)
            self.content[name] = random_layers(self.layout, len(blocks), self.chance)
            self.fresh.append(name)

    def offload(self) -> None:
        if not (names := [n for n in self.here if n not in self.fresh]):
            return
        name = self.chance.choice(names)
        if host_blocks := self.take(self.host_free, len(self.here[name])):
            self.in_host[name] = host_blocks
            self.move(name, Direction.OFFLOAD, self.here[name])
            self.finished += 1
            self.free += self.here.pop(name)
            self.content[name] = there_and_back(self.layout, self.content[name], self.tokens[name])

    def upload(self) -> None:
        on_the_way = {name for name, _ in self.uploading.values()}
        if not (names := [n for n in self.in_host if n not in on_the_way]):
            return
        name = self.chance.choice(names)
        if blocks := self.take(self.free, len(self.in_host[name])):
            self.move(name, Direction.UPLOAD, blocks)
            self.uploading[self.serials] = name, blocks

    def recall(self) -> None:
        if self.uploading:
            serial = self.chance.choice(list(self.uploading))
            name, blocks = self.uploading.pop(serial)
            self.recalled.append(serial)
            self.free += blocks
            if self.chance.random() < 0.5:
                self.host_free += self.in_host.pop(name)

    def drop(self) -> None:
        if names := [n for n in self.here if n not in self.fresh]:
            self.free += self.here.pop(self.chance.choice(names))

    def reset(self) -> None:
        self.swapper.reset()
        for name, blocks in self.uploading.values():
            self.free += blocks
            self.host_free += self.in_host.pop(name)
        self.uploading.clear()

    def settle(self) -> None:
        for serial in self.swapper.settle():
            name, blocks = self.uploading.pop(serial)
            self.host_free += self.in_host.pop(name)
            self.here[name] = blocks
            self.finished += 1
            self.read(name)

    def take(self, free: list[int], count: int) -> list[int]:
        if count > len(free):
            return []
        if self.chance.random() < 0.5:
            free.sort()  # sometimes runs of consecutive blocks
        return [free.pop() for _ in range(count)][::-1]

    def move(self, name: str, direction: Direction, blocks: list[int]) -> None:
        self.serials += 1
        host_blocks = tuple(self.in_host[name])
        self.started.append(
            KVTransfer(self.serials, name, direction, tuple(blocks), host_blocks, self.tokens[name])
        )

    # The model's kernels

    def compute(self) -> None:
        for name in self.fresh:
            self.write(self.here[name], self.content[name])
        spoilt = self.chance.sample(self.free, self.chance.randint(0, len(self.free)))
        self.write(spoilt, random_layers(self.layout, len(spoilt), self.chance))
        if self.here:
            self.read(self.chance.choice(list(self.here)))

    def write(self, blocks: list[int], content: list[KVLayer]) -> None:
        blocks = list(blocks)
        self.streams.issue(Lane.COMPUTE, "model", lambda: write(self.layers, blocks, content))

    def read(self, name: str) -> None:
        blocks, content, tokens = self.here[name], self.content[name], self.tokens[name]

        def check() -> None:
            if not holds(self.layers, blocks, content, tokens):
                self.wrong.append(name)

        self.streams.issue(Lane.COMPUTE, "model", check)

    def drain(self) -> None:
        """Reads all KV on the device, and all in host memory after its upload."""
        while self.here or self.in_host:
            for name in list(self.here):
                self.read(name)
                self.free += self.here.pop(name)
            self.started = []
            self.upload()
            self.swapper.start(TransferPlan(tuple(self.started)))
            while self.swapper.busy:
                self.swapper.wait()
                self.settle()
        self.streams.finish_all()
        assert sorted(self.free) == list(range(DEVICE_BLOCKS))
        assert sorted(self.host_free) == list(range(HOST_BLOCKS))

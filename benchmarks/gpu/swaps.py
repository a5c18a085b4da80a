"""Swapping with the worker's own swapper: against the pinned copy's ceiling, and beside decode."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.attention import (
    BLOCK_TOKENS,
    DTYPE,
    HEAD_DIM,
    HEADS,
    OPTIONS,
    SHARE,
    kernels,
    make_layer,
    rows_of,
    scattered,
)
from benchmarks.gpu.timing import Measurement, event
from benchmarks.harness.report import Figure, figure
from services.costs import Direction
from services.worker.engine.memory import staging_bytes
from services.worker.kernels.cuda.blocks import TritonBlocks
from services.worker.kv.cache import KVLayer, KVShape
from services.worker.kv.device_streams import CudaStreams, Lane
from services.worker.kv.host_cache import HostCache
from services.worker.kv.staging import RecordLayout, RingSize
from services.worker.kv.swapper import Swapper
from services.worker.kv.transfers import KVTransfer, TransferPlan
from services.worker.machine import free_host_bytes
from services.worker.requests.types.batch import StepBatch

KV_HEADS = 8
LAYERS = 32
LAYER_TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize


@dataclass
class SwapBench:
    """A swapper over `layers`, as the engine makes it, and moves of its blocks in random order."""

    layers: list[KVLayer]
    streams: CudaStreams
    swapper: Swapper
    record_bytes: int
    order: list[int]
    moves: int = 0

    def start(self, direction: Direction, tokens: int) -> None:
        blocks = tuple(range(tokens // BLOCK_TOKENS))
        device_blocks = tuple(self.order[: len(blocks)])
        self.moves += 1
        move = KVTransfer(self.moves, "r", direction, device_blocks, blocks, tokens)
        if self.swapper.start(TransferPlan((move,))):
            raise RuntimeError("the host pool could not be had")

    def finish(self) -> None:
        """Until every upload under way has been scattered."""
        while self.swapper.busy:
            self.swapper.wait()
            self.swapper.settle()

    def move_s(self, direction: Direction, tokens: int) -> float:
        """One move alone, from its first kernel or copy to its last."""
        torch.cuda.synchronize()
        start = event()
        self.start(direction, tokens)
        self.finish()
        lane = Lane.COPY if direction is Direction.OFFLOAD else Lane.COMPUTE
        end = self.streams.record(lane)
        torch.cuda.synchronize()
        return self.streams.elapsed_s(start, end)


def make_swap_bench(layers: int, blocks: int, tokens: int, swap_int8: bool) -> SwapBench:
    """Moves of up to `tokens`."""
    device = torch.device("cuda", torch.cuda.current_device())
    layout = RecordLayout(
        (KVShape(KV_HEADS, HEAD_DIM),) * layers, BLOCK_TOKENS, DTYPE, swap_int8=swap_int8
    )
    record_bytes = layout.record_bytes
    host = HostCache(tokens // BLOCK_TOKENS, record_bytes, free_host_bytes, pinned=True)
    host.require()
    ring = RingSize.within(staging_bytes(device), record_bytes)
    streams = CudaStreams(device)
    cache = [make_layer(blocks, KV_HEADS) for _ in range(layers)]
    swapper = Swapper(cache, TritonBlocks(device), layout, host, streams, ring)
    return SwapBench(cache, streams, swapper, record_bytes, scattered(blocks).tolist())


def swap_lines(
    quick: bool, repeats: int, down_ceiling: float, up_ceiling: float
) -> Iterator[Measurement]:
    """Reach: gather and copy to the host at 85 % of a plain pinned copy."""
    tokens, layers = (512, 4) if quick else (8192, LAYERS)
    for swap_int8 in (False, True):
        rig = make_swap_bench(layers, 2 * tokens // BLOCK_TOKENS, tokens, swap_int8)
        moved = rig.record_bytes * tokens // BLOCK_TOKENS
        kind = "INT8" if swap_int8 else "native"
        for direction, ceiling in [
            (Direction.OFFLOAD, down_ceiling),
            (Direction.UPLOAD, up_ceiling),
        ]:
            rig.move_s(direction, tokens)  # compiles
            spans = [rig.move_s(direction, tokens) for _ in range(repeats)]
            share = figure([moved / s / ceiling for s in spans])
            reach = 0.85 if direction is Direction.OFFLOAD else None
            name = f"{direction.value} {tokens} tokens, {kind}, of the pinned copy"
            yield Measurement(name, share, reach=reach)


def overlap_lines(quick: bool, repeats: int) -> Iterator[Measurement]:
    """Reach: decode loses less than 5 % while requests come and go beside it."""
    batch, context, layers, tokens = (4, 2048, 4, 256) if quick else (32, 8192, LAYERS, 1024)
    per_layer = batch * context * LAYER_TOKEN_BYTES
    layers = max(1, min(layers, int(SHARE * torch.cuda.mem_get_info()[0] / per_layer)))
    for swap_int8 in (False, True):
        yield _overlap(batch, context, layers, tokens, swap_int8, repeats)


def _overlap(
    batch: int, context: int, layers: int, tokens: int, swap_int8: bool, repeats: int
) -> Measurement:
    rows, blocks = rows_of(batch, context)
    spare = tokens // BLOCK_TOKENS  # swapped blocks that no step attends to
    rig = make_swap_bench(layers, blocks + spare, tokens, swap_int8)
    rig.order = list(range(blocks, blocks + spare))
    attention = kernels()
    attention.prepare(StepBatch(rows, []), torch.from_numpy(rows.slots).cuda())
    q = torch.randn(batch, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    kv = q[:, :KV_HEADS]

    def decode() -> None:
        for layer in rig.layers:
            attention.attend(layer, q, kv, kv, OPTIONS)

    directions = [Direction.OFFLOAD, Direction.UPLOAD]

    def decode_and_swap() -> None:
        rig.swapper.settle()
        if not rig.swapper.busy:
            rig.start(directions[rig.moves % 2], tokens)
        decode()

    alone = _steps_s(decode, repeats)
    swapping = _steps_s(decode_and_swap, repeats)
    rig.finish()
    torch.cuda.synchronize()
    cost = figure([s / alone.median - 1 for s in swapping.values])
    kind = "INT8" if swap_int8 else "native"
    name = f"cost to decode {batch} x {context} x {layers} layers of swapping {tokens} tokens"
    return Measurement(f"{name} a step, {kind}", cost, reach=0.05, below=True)


def _steps_s(step: Callable[[], None], repeats: int, steps: int = 8) -> Figure:
    """Of one step, by the compute stream's clock; like an engine's, each step ends with the host
    waiting for what was computed."""
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    values = []
    for _ in range(repeats):
        start = event()
        for _ in range(steps):
            step()
            torch.cuda.current_stream().synchronize()
        end = event()
        end.synchronize()
        values.append(start.elapsed_time(end) / 1000 / steps)
    return figure(values)

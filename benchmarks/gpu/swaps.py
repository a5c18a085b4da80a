"""Times the worker's swapper against a pinned copy, and decode during swaps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.attention import (
    BLOCK_TOKENS,
    DTYPE,
    HEAD_DIM,
    HEADS,
    MEMORY_SHARE,
    OPTIONS,
    kernels,
    make_layer,
    rows_of,
    scattered,
)
from benchmarks.gpu.timing import Measurement, event, rates, times_s
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
    """The engine's swapper over `layers`; moves its blocks in `order`."""

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
            raise RuntimeError("the host pool cannot be allocated")

    def finish(self) -> None:
        """Waits until every upload has been scattered."""
        while self.swapper.busy:
            self.swapper.wait()
            self.swapper.settle()

    def move_s(self, direction: Direction, tokens: int) -> float:
        """Times one move without other work, from its first kernel or copy to its last."""
        torch.cuda.synchronize()
        start = event()
        self.start(direction, tokens)
        self.finish()
        lane = Lane.COPY if direction is Direction.OFFLOAD else Lane.COMPUTE
        end = self.streams.record(lane)
        torch.cuda.synchronize()
        return self.streams.elapsed_s(start, end)


def make_swap_bench(layers: int, blocks: int, tokens: int, swap_int8: bool) -> SwapBench:
    """Returns a swapper for moves of up to `tokens`."""
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
    """Target: offloads at 85 % of a pinned copy's rate."""
    tokens, layers = (512, 4) if quick else (8192, LAYERS)
    for swap_int8 in (False, True):
        bench = make_swap_bench(layers, 2 * tokens // BLOCK_TOKENS, tokens, swap_int8)
        moved = bench.record_bytes * tokens // BLOCK_TOKENS
        kind = "INT8" if swap_int8 else "native"
        for direction, ceiling in [
            (Direction.OFFLOAD, down_ceiling),
            (Direction.UPLOAD, up_ceiling),
        ]:
            bench.move_s(direction, tokens)  # compiles the kernels
            moves_s = figure([bench.move_s(direction, tokens) for _ in range(repeats)])
            share = rates(moved / ceiling, moves_s)
            target = 0.85 if direction is Direction.OFFLOAD else None
            name = f"{direction.value} {tokens} tokens, {kind}, of the pinned copy"
            yield Measurement(name, share, target=target)


def overlap_lines(quick: bool, repeats: int) -> Iterator[Measurement]:
    """Target: decode loses less than 5 % during swaps."""
    batch, context, layers, tokens = (4, 2048, 4, 256) if quick else (32, 8192, LAYERS, 1024)
    per_layer = batch * context * LAYER_TOKEN_BYTES
    layers = max(1, min(layers, int(MEMORY_SHARE * torch.cuda.mem_get_info()[0] / per_layer)))
    for swap_int8 in (False, True):
        yield _overlap(batch, context, layers, tokens, swap_int8, repeats)


def _overlap(
    batch: int, context: int, layers: int, tokens: int, swap_int8: bool, repeats: int
) -> Measurement:
    rows, blocks = rows_of(batch, context)
    spare = tokens // BLOCK_TOKENS  # swapped blocks, which no step attends to
    bench = make_swap_bench(layers, blocks + spare, tokens, swap_int8)
    bench.order = list(range(blocks, blocks + spare))
    attention = kernels()
    attention.prepare(StepBatch(rows, []), torch.from_numpy(rows.slots).cuda())
    q = torch.randn(batch, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    kv = q[:, :KV_HEADS]

    def decode() -> None:
        for layer in bench.layers:
            attention.attend(layer, q, kv, kv, OPTIONS)

    directions = [Direction.OFFLOAD, Direction.UPLOAD]

    def decode_and_swap() -> None:
        bench.swapper.settle()
        if not bench.swapper.busy:
            bench.start(directions[bench.moves % 2], tokens)
        decode()

    alone = _steps_s(decode, repeats)
    swapping = _steps_s(decode_and_swap, repeats)
    bench.finish()
    torch.cuda.synchronize()
    cost = figure([s / alone.median - 1 for s in swapping.values])
    kind = "INT8" if swap_int8 else "native"
    name = f"cost to decode {batch} x {context} x {layers} layers of swapping {tokens} tokens"
    return Measurement(f"{name} a step, {kind}", cost, target=0.05, at_most=True)


def _steps_s(step: Callable[[], None], repeats: int) -> Figure:
    """Times one step. The host waits for its result, as in an engine."""

    def step_and_wait() -> None:
        step()
        torch.cuda.current_stream().synchronize()

    return times_s(step_and_wait, repeats, inner=8)

"""Loads all measured systems at once with the same model: foretoken in three ways, and peers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.engine.bare_engine import BareEngine
from benchmarks.engine.cases import DTYPES
from benchmarks.engine.peers import TransformersBatching, vllm_loop
from benchmarks.engine.shapes import kv_bytes_per_token
from benchmarks.engine.system_process import SystemProcess
from benchmarks.harness.clients import GrpcClient, HttpClient, measure_throughput
from benchmarks.harness.system import foretoken_system, settings, vllm_server
from benchmarks.harness.throughput import Prompts

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
SETTLE_S = {"vllm": 1.5, "vllm_http": 1.5}  # vLLM polls for a second after the last message
SERVED = {"grpc", "http"}  # interfaces of the same system
Throughput = Callable[[Prompts, int], Awaitable[float]]  # prompts, output tokens → tokens/s


@dataclass(frozen=True)
class SystemSettings:
    """Settings of all systems.

    kv_tokens: KV memory of each. max_tokens: length of the longest sequence. streams: concurrent
    requests. threads: of systems that do not select a number.
    """

    folder: str
    dtype: str
    kv_tokens: int
    max_tokens: int
    streams: int
    threads: int
    peer_python: str
    systems: tuple[str, ...]

    @property
    def name(self) -> str:
        return Path(self.folder).name

    @property
    def kv_bytes(self) -> int:
        return self.kv_tokens * kv_bytes_per_token(self.folder, ELEMENT_BYTES[self.dtype])

    @property
    def serve_arguments(self) -> list[str]:
        """Arguments of `foretoken serve`."""
        choices = settings(f"worker.dtype={DTYPES[self.dtype]}", "log.path=")
        return ["--model", self.folder, "--kv-tokens", str(self.kv_tokens), *choices]


@dataclass
class LoadedSystems:
    """Running systems by name.

    throughputs: measure tokens per second, all prompts at once. missing: reasons of peers that are
    unavailable or failed. cold_start_s: from the start of a process until it is ready.
    """

    throughputs: dict[str, Throughput] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    cold_start_s: dict[str, float] = field(default_factory=dict)

    async def measure(self, name: str, prompts: Prompts, output_tokens: int) -> float | None:
        """Returns None for a missing system. A peer that fails is missing from then on. Returns
        when the measured system leaves the cores idle."""
        if name not in self.throughputs:
            return None
        try:
            rate = await self.throughputs[name](prompts, output_tokens)
            await asyncio.sleep(SETTLE_S.get(name, 0.0))
            return rate
        except Exception as error:
            if name not in PEERS:
                raise
            self.remove(name, error)
            return None

    def remove(self, name: str, error: Exception) -> None:
        self.throughputs.pop(name, None)
        self.missing[name] = " ".join(str(error).split()) or type(error).__name__


def cold_starts_s(system: SystemSettings, times: int) -> list[float]:
    """Measures cold starts of the whole system; none if it is not a measured system."""
    starts_s: list[float] = []
    for _ in range(times if SERVED & set(system.systems) else 0):
        began_s = time.perf_counter()
        with foretoken_system(*system.serve_arguments):
            starts_s.append(time.perf_counter() - began_s)
    return starts_s


@asynccontextmanager
async def load_systems(system: SystemSettings) -> AsyncIterator[LoadedSystems]:
    """Starts the systems one after the other."""
    loaded = LoadedSystems()
    async with AsyncExitStack() as stack:
        if "engine" in system.systems:
            process = SystemProcess(
                BareEngine, system.folder, system.kv_tokens, DTYPES[system.dtype]
            )
            loaded.throughputs["engine"] = await _start(process, stack)
        if SERVED & set(system.systems):
            await _start_foretoken(system, loaded, stack)
        for name in system.systems:
            if name in PEERS:
                try:
                    loaded.throughputs[name] = await PEERS[name](system, loaded, stack)
                except Exception as error:
                    loaded.remove(name, error)
        yield loaded


async def _start(process: SystemProcess, stack: AsyncExitStack) -> Throughput:
    stack.enter_context(process)
    await process.start()
    return process.tokens_per_s


async def _start_foretoken(
    system: SystemSettings, loaded: LoadedSystems, stack: AsyncExitStack
) -> None:
    began_s = time.perf_counter()
    running = foretoken_system(*system.serve_arguments)
    served = await asyncio.to_thread(stack.enter_context, running)
    loaded.cold_start_s["foretoken"] = time.perf_counter() - began_s
    grpc, http = GrpcClient(served.grpc), HttpClient(served.http, system.name)
    stack.push_async_callback(grpc.close)
    loaded.throughputs["grpc"] = partial(measure_throughput, grpc.generate)
    loaded.throughputs["http"] = partial(measure_throughput, http.generate)


async def _start_transformers(
    system: SystemSettings, loaded: LoadedSystems, stack: AsyncExitStack
) -> Throughput:
    arguments = (system.folder, system.kv_tokens, system.streams, DTYPES[system.dtype])
    return await _start(
        SystemProcess(TransformersBatching, *arguments, threads=system.threads), stack
    )


async def _start_vllm(
    system: SystemSettings, loaded: LoadedSystems, stack: AsyncExitStack
) -> Throughput:
    began_s = time.perf_counter()
    running = vllm_loop(
        system.peer_python,
        system.folder,
        DTYPES[system.dtype],
        system.kv_tokens,
        system.kv_bytes,
        system.max_tokens,
    )
    loop = await stack.enter_async_context(running)
    await loop.wait_until_ready()
    loaded.cold_start_s["vllm"] = time.perf_counter() - began_s
    return loop.tokens_per_s


async def _start_vllm_http(
    system: SystemSettings, loaded: LoadedSystems, stack: AsyncExitStack
) -> Throughput:
    running = vllm_server(
        system.peer_python,
        system.kv_tokens,
        system.folder,
        DTYPES[system.dtype],
        system.max_tokens,
        system.kv_bytes,
    )
    served = await asyncio.to_thread(stack.enter_context, running)
    return partial(measure_throughput, HttpClient(served.http, system.name).generate)


PEERS: dict[
    str, Callable[[SystemSettings, LoadedSystems, AsyncExitStack], Awaitable[Throughput]]
] = {
    "transformers": _start_transformers,
    "vllm": _start_vllm,
    "vllm_http": _start_vllm_http,
}

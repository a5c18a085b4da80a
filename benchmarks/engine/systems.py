"""All measured systems, loaded at once with the same model: ours three ways, and two peers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path

from benchmarks.engine.bare_engine import BareEngine
from benchmarks.engine.cases import DTYPES
from benchmarks.engine.peer import GIB, vllm_loop
from benchmarks.engine.shapes import kv_bytes_per_token
from benchmarks.engine.system_process import SystemProcess
from benchmarks.harness.clients import GrpcClient, HttpClient, tokens_per_s
from benchmarks.harness.peers import Transformers
from benchmarks.harness.system import system, vllm

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
AFTER_S = {"vllm": 1.5, "vllm_http": 1.5}  # processes that poll for a second after the last message
SERVED = {"grpc", "http"}  # interfaces of the same system
Rate = Callable[[Sequence[Sequence[int]], int], Awaitable[float]]  # prompts, output tokens


@dataclass(frozen=True)
class Serve:
    """The settings of all systems: `kv_tokens` of memory each, sequences up to `length_tokens`, at
    most `streams` at once; `threads` for systems that do not choose."""

    folder: str
    dtype: str
    kv_tokens: int
    length_tokens: int
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
    def arguments(self) -> list[str]:
        """Of `foretoken serve`."""
        settings = (f"worker.dtype={DTYPES[self.dtype]}", "log.path=")
        sets = [word for setting in settings for word in ("--set", setting)]
        return ["--model", self.folder, "--kv-tokens", str(self.kv_tokens), *sets]


@dataclass
class Standing:
    """`rates`: tokens per second, all prompts at once. `missing`: peers that are unavailable or
    failed, and why. `cold_start_s`: from the start of a process to ready."""

    rates: dict[str, Rate] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    cold_start_s: dict[str, float] = field(default_factory=dict)

    async def measure(
        self, name: str, prompts: Sequence[Sequence[int]], output_tokens: int
    ) -> float | None:
        """None for a missing system; a peer that fails is missing from then on. Returns once the
        measured system leaves the cores idle."""
        if name not in self.rates:
            return None
        try:
            rate = await self.rates[name](prompts, output_tokens)
            await asyncio.sleep(AFTER_S.get(name, 0.0))
            return rate
        except Exception as error:
            if name not in PEERS:
                raise
            self.lose(name, error)
            return None

    def lose(self, name: str, error: Exception) -> None:
        self.rates.pop(name, None)
        self.missing[name] = " ".join(str(error).split()) or type(error).__name__


def starts_s(serve: Serve, times: int) -> list[float]:
    """Cold starts of the whole system; none if it is not measured."""
    taken: list[float] = []
    if not SERVED & set(serve.systems):
        return taken
    for _ in range(times):
        began = time.perf_counter()
        with system(*serve.arguments):
            taken.append(time.perf_counter() - began)
    return taken


@asynccontextmanager
async def standing(serve: Serve) -> AsyncIterator[Standing]:
    """Starts the systems one after the other."""
    found = Standing()
    async with AsyncExitStack() as stack:
        if "engine" in serve.systems:
            await _bare(serve, found, stack)
        if SERVED & set(serve.systems):
            await _served(serve, found, stack)
        for name in serve.systems:
            if name in PEERS:
                try:
                    await PEERS[name](serve, found, stack)
                except Exception as error:
                    found.lose(name, error)
        yield found


async def _bare(serve: Serve, found: Standing, stack: AsyncExitStack) -> None:
    process = SystemProcess(BareEngine, serve.folder, serve.kv_tokens, DTYPES[serve.dtype])
    stack.enter_context(process)
    await process.begin()
    found.rates["engine"] = process.tokens_per_s


async def _served(serve: Serve, found: Standing, stack: AsyncExitStack) -> None:
    began = time.perf_counter()
    running = system(*serve.arguments)
    http_url, grpc_address = await asyncio.to_thread(stack.enter_context, running)
    found.cold_start_s["foretoken"] = time.perf_counter() - began
    grpc, http = GrpcClient(grpc_address), HttpClient(http_url, serve.name)
    stack.push_async_callback(grpc.close)
    found.rates["grpc"] = partial(tokens_per_s, grpc.ask)
    found.rates["http"] = partial(tokens_per_s, http.ask)


async def _transformers(serve: Serve, found: Standing, stack: AsyncExitStack) -> None:
    arguments = (serve.folder, serve.kv_tokens, serve.streams, DTYPES[serve.dtype])
    process = SystemProcess(Transformers, *arguments, threads=serve.threads)
    stack.enter_context(process)
    await process.begin()
    found.rates["transformers"] = process.tokens_per_s


async def _vllm(serve: Serve, found: Standing, stack: AsyncExitStack) -> None:
    began = time.perf_counter()
    loop = await stack.enter_async_context(
        vllm_loop(
            serve.peer_python,
            serve.folder,
            DTYPES[serve.dtype],
            serve.kv_tokens,
            serve.kv_bytes,
            serve.length_tokens,
        )
    )
    await loop.ready()
    found.cold_start_s["vllm"] = time.perf_counter() - began
    found.rates["vllm"] = loop.tokens_per_s


async def _vllm_http(serve: Serve, found: Standing, stack: AsyncExitStack) -> None:
    running = vllm(
        serve.peer_python,
        serve.kv_tokens,
        serve.folder,
        DTYPES[serve.dtype],
        serve.length_tokens,
        ceil(serve.kv_bytes / GIB),
    )
    url = await asyncio.to_thread(stack.enter_context, running)
    found.rates["vllm_http"] = partial(tokens_per_s, HttpClient(url, serve.name).ask)


PEERS: dict[str, Callable[[Serve, Standing, AsyncExitStack], Awaitable[None]]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "vllm_http": _vllm_http,
}

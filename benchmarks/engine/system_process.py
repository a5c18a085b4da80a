"""Runs a measured system in a separate process, with its own threads and memory."""

import asyncio
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Protocol, Self

import torch

from benchmarks.harness.throughput import Prompts


class MeasuredSystem(Protocol):
    def tokens_per_s(self, prompts: Prompts, output_tokens: int) -> float: ...


class SystemProcess:
    """`start` creates `kind(*arguments)` in the process; its exceptions are raised here."""

    def __init__(self, kind: type[MeasuredSystem], *arguments: object, threads: int = 0):
        self._arguments = (kind, arguments, threads)
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))

    async def start(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, _create, *self._arguments)

    async def tokens_per_s(self, prompts: Prompts, output_tokens: int) -> float:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _measure, prompts, output_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


_systems: list[MeasuredSystem] = []  # the system of this process


def _create(kind: type[MeasuredSystem], arguments: tuple[object, ...], threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
    _systems[:] = [kind(*arguments)]


def _measure(prompts: Prompts, output_tokens: int) -> float:
    return _systems[0].tokens_per_s(prompts, output_tokens)

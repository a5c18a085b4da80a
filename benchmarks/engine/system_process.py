"""Runs a measured system in a process of its own, with its own threads and memory."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Protocol, Self

import torch

Prompts = Sequence[Sequence[int]]


class Measured(Protocol):
    def tokens_per_s(self, prompts: Prompts, output_tokens: int) -> float: ...


class SystemProcess:
    """`begin` creates it there as `kind(*arguments)`; its exceptions are raised here."""

    def __init__(self, kind: type[Measured], *arguments: object, threads: int = 0):
        self._arguments = (kind, arguments, threads)
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))

    async def begin(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, _make, *self._arguments)

    async def tokens_per_s(self, prompts: Prompts, output_tokens: int) -> float:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _measure, prompts, output_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


_instances: list[Measured] = []  # the instance of this process


def _make(kind: type[Measured], arguments: tuple[object, ...], threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
    _instances[:] = [kind(*arguments)]


def _measure(prompts: Prompts, output_tokens: int) -> float:
    return _instances[0].tokens_per_s(prompts, output_tokens)

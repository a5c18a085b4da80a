"""Sends a load: each request when it is due, or when an earlier one has ended."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from random import Random

from foretoken.bench.load import Load, due_times_s
from foretoken.bench.prompts import Prompts, Writer
from foretoken.bench.samples import Sample
from foretoken.bench.served import AnyServer

Bodies = Iterator[tuple[str, bytes]]


@dataclass
class LoadProgress:
    """Counts of sent, ended and failed requests; `on_change` is called whenever a request ends."""

    on_change: Callable[["LoadProgress"], None] = lambda _: None
    sent: int = 0
    ended: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Target:
    """A server and its requests. `classes` are the SLA classes that requests name in turn."""

    server: AnyServer
    writer: Writer
    prompts: Prompts
    timeout_s: float = 300.0
    classes: tuple[str, ...] = ()

    def bodies(self, seed: int) -> Bodies:
        return map(self.writer.body, self.prompts(Random(seed)))


@dataclass(frozen=True)
class Round:
    """The result of one load: samples in send order, duration, and the client's share of a core."""

    samples: list[Sample]
    lasted_s: float
    stopped: bool = False
    cpu: float = 0.0
    load: Load = field(default_factory=Load)


async def drive(
    target: Target, load: Load, seed: int, stop: asyncio.Event, progress: LoadProgress | None = None
) -> Round:
    """Sends the load and awaits every answer.

    Once `stop` is set, sending ends and requests in flight are cancelled. The same seed sends the
    same requests at the same times.
    """
    run = _LoadRun(target, target.bodies(seed), progress or LoadProgress())
    work = _open_loop if load.rate else _closed_loop
    cpu_s = time.process_time()
    sender = asyncio.create_task(work(run, load, Random(seed)))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({sender, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopped = not sender.done()
    finally:
        for task in (sender, stopping):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await sender
    lasted_s = time.perf_counter() - run.started
    cpu = (time.process_time() - cpu_s) / max(lasted_s, 1e-9)
    return Round(run.samples, lasted_s, stopped, cpu, load)


class _LoadRun:
    """State that both loops share."""

    def __init__(self, target: Target, bodies: Bodies, progress: LoadProgress):
        self.samples: list[Sample] = []
        self.started = time.perf_counter()
        self._target, self._bodies, self._progress = target, bodies, progress
        self._classes = cycle(target.classes or ("",))

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.started

    async def send_one(self, due_s: float) -> None:
        """Sends one request and records its sample. Raises only CancelledError."""
        progress, target = self._progress, self._target
        path, body = next(self._bodies)
        sample = Sample(due_s, next(self._classes))
        self.samples.append(sample)
        progress.sent += 1
        try:
            await target.server.stream(path, body, sample, self.started, target.timeout_s)
        finally:
            progress.ended += 1
            progress.failed += bool(sample.problem)
            progress.on_change(progress)


async def _open_loop(run: _LoadRun, load: Load, rng: Random) -> None:
    times = due_times_s(load, rng)
    async with asyncio.TaskGroup() as group:
        for due_s in times:
            if (wait_s := due_s - run.now_s) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(run.send_one(due_s))


async def _closed_loop(run: _LoadRun, load: Load, rng: Random) -> None:
    numbers = count()

    async def send_in_turn() -> None:
        while not (
            (load.requests and next(numbers) >= load.requests)
            or (load.seconds and run.now_s >= load.seconds)
        ):
            await run.send_one(run.now_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency):
            group.create_task(send_in_turn())

"""The scheduler's servicer with its real advisers, in process."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CollectorRegistry
from services.scheduler.ranking import UNMEASURED

from foretoken.embedded import build_control
from foretoken.options import ServeOptions, sections
from protos import common_pb2, scheduler_pb2
from services.runtime.channel import connect
from services.runtime.tasks import background
from tests.reach import until

PROFILE = [
    common_pb2.StepTiming(
        prefill_tokens=p,
        decode_seqs=d,
        context_tokens=d * (16 + d % 5) + p,
        elapsed_s=0.01 + p * 1e-4,
    )
    for p in (0, 16, 64, 256)
    for d in range(1, 33)
]
HELLO = scheduler_pb2.WorkerMessage(
    hello=scheduler_pb2.WorkerHello(
        worker_id="w", address="unix:/w", model="demo", block_tokens=16, kv_tokens=1_600,
        max_running=8, max_context_tokens=500, profile=PROFILE,
    )
)  # fmt: skip


async def test_a_worker_that_comes_back_has_its_cost_model_again():
    scheduler = build_control(
        sections(ServeOptions()), connect("unix:/none"), CollectorRegistry()
    ).scheduler
    workers = scheduler.state.workers

    async def attached(leave: asyncio.Event) -> None:
        async def messages() -> AsyncIterator[Any]:
            yield HELLO
            await leave.wait()

        async for _ in scheduler.Attach(messages(), None):
            pass

    async with background(scheduler.run()):
        for _ in range(2):
            leave = asyncio.Event()
            staying = asyncio.ensure_future(attached(leave))
            await until(lambda: "w" in workers and workers["w"].cost is not UNMEASURED)
            assert workers["w"].cost.samples > 0
            leave.set()
            await staying
            assert "w" not in workers

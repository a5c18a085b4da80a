"""What `foretoken serve` shows: one line when ready, then a live one on a terminal."""

import asyncio
import sys
from urllib.request import urlopen

from grpc import aio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from protos import scheduler_pb2, scheduler_pb2_grpc
from services.runtime.startup import process_age_s

EVERY_S = 0.5


async def fleet_of(scheduler: aio.Channel, workers: int) -> scheduler_pb2.FleetView:
    """The fleet, once so many workers have attached."""
    stub = scheduler_pb2_grpc.SchedulerStub(scheduler)
    while True:
        try:
            fleet = await stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=2.0)
            if len(fleet.workers) >= workers:
                return fleet
        except aio.AioRpcError:
            pass  # it is still starting; its process ending is what ends this wait
        await asyncio.sleep(0.05)


async def healthy(url: str) -> None:
    """Return once the gateway says it is: it has a scheduler and a worker. Ends with its server."""
    while True:
        try:
            await asyncio.to_thread(urlopen, url, timeout=2)
            return
        except OSError:
            await asyncio.sleep(0.02)


def ready_line(fleet: scheduler_pb2.FleetView, http: str, grpc: str) -> str:
    first = fleet.workers[0]
    took = f"started in {process_age_s():.1f} s (a worker's {first.start})"
    return (
        f"foretoken is ready: {first.model} on {len(fleet.workers)} worker(s) with "
        f"{first.kv_tokens} KV tokens each, policy {fleet.policy}, {took}, HTTP {http}, gRPC {grpc}"
    )


def describe(fleet: scheduler_pb2.FleetView) -> str:
    capacity = sum(worker.kv_tokens for worker in fleet.workers) or 1
    held = sum(worker.held_tokens for worker in fleet.workers)
    running = sum(worker.running for worker in fleet.workers)
    return (
        f"{running} running · {fleet.queued} waiting · KV {held / capacity:.0%} · "
        f"{len(fleet.workers)} worker(s) · drains in {fleet.drain_s:.0f} s"
    )


async def show(scheduler: aio.Channel) -> None:
    """Keep a status line on the terminal; returns at once where there is none."""
    if not sys.stderr.isatty():
        return
    stub = scheduler_pb2_grpc.SchedulerStub(scheduler)
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        while True:
            try:
                fleet = await stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=2.0)
                live.update(Text(describe(fleet), style="dim"), refresh=True)
            except aio.AioRpcError as error:
                live.update(Text(f"scheduler: {error.details()}", style="red"), refresh=True)
            await asyncio.sleep(EVERY_S)

"""What `foretoken serve` shows: one line when ready, a live one on a terminal, one every 10 s under
load, and what it waits for when it is left."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from grpc import aio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from foretoken.running.told.lines import say
from foretoken.running.told.throughput import EVERY_S as THROUGHPUT_S
from foretoken.running.told.throughput import Throughput, kv_share, totals_of
from protos.generated import scheduler_pb2, scheduler_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from services.runtime.server import Lifecycle
from services.runtime.startup import process_age_s
from services.runtime.tasks import background

log = logging.getLogger(__name__)

EVERY_S = 0.5
ASK_S = 2.0  # what a service gets to answer
FORECASTS_S = 30.0  # many times what a predictor takes to start where it has a core
WAITS_LOOK_S = 0.2  # at what is still being answered
WAITS_SAY_S = 5.0  # between two lines about it

Scrape = Callable[[], Awaitable[str]]  # what the gateway has counted, as its metrics say it


async def fleet_of(scheduler: aio.Channel, workers: Callable[[], int]) -> scheduler_pb2.FleetView:
    """The fleet, once so many workers have attached."""
    stub = scheduler_pb2_grpc.SchedulerStub(scheduler)
    while True:
        try:
            fleet = await stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=ASK_S)
            if len(fleet.workers) >= workers():
                return fleet
        except aio.AioRpcError:
            pass  # it is still starting; its process ending is what ends this wait
        await asyncio.sleep(0.05)


async def healthy(url: str) -> None:
    """Return once the gateway says it is: it has a scheduler and a worker. Ends with its server."""
    while not await _is_ok(url):  # noqa: ASYNC110 - another process tells of no event
        await asyncio.sleep(0.02)


async def _is_ok(url: str) -> bool:
    """Asked on this loop, and no thread of a pool is waited for at the end."""
    parts = urlsplit(url)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(ASK_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            asked = (
                f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
            )
            writer.write(asked.encode())
            return (await reader.readline()).split(b" ")[1:2] == [b"200"]
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()


async def forecasting(
    predictor: aio.Channel, lifecycle: Lifecycle, limit_s: float = FORECASTS_S
) -> None:
    """Return once the predictor is reached. Serving can do without: after `limit_s` a warning says
    so instead. A signal to leave ends the wait as well."""
    reached = asyncio.ensure_future(predictor.channel_ready())
    leaving = asyncio.ensure_future(lifecycle.draining.wait())
    try:
        await asyncio.wait({reached, leaving}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not (reached.done() or leaving.done()):
            log.warning(
                "the predictor is not up after %g s: until it is, forecasts come from history",
                limit_s,
            )
    finally:
        for pending in (reached, leaving):
            pending.cancel()
        await asyncio.gather(reached, leaving, return_exceptions=True)


def ready_line(fleet: scheduler_pb2.FleetView, http: str, grpc: str) -> str:
    first = fleet.workers[0]
    took = f"started in {process_age_s():.1f} s (a worker's {first.start})"
    return (
        f"foretoken is ready: {first.model} on {len(fleet.workers)} worker(s) with "
        f"{first.kv_tokens} KV tokens each, policy {fleet.policy}, {took}, HTTP {http}, gRPC {grpc}"
    )


def describe(fleet: scheduler_pb2.FleetView) -> str:
    running = sum(worker.running for worker in fleet.workers)
    return (
        f"{running} running · {fleet.queued} waiting · KV {kv_share(fleet):.0%} · "
        f"{len(fleet.workers)} worker(s) · drains in {fleet.drain_s:.0f} s"
    )


def scraping(gateway: aio.Channel) -> Scrape:
    """What a gateway of its own process has counted."""
    stub = telemetry_pb2_grpc.TelemetryStub(gateway)

    async def scrape() -> str:
        return (await stub.Scrape(telemetry_pb2.ScrapeRequest(), timeout=ASK_S)).text

    return scrape


async def show(scheduler: aio.Channel, scrape: Scrape) -> None:
    """A status line on the terminal, where there is one, and under load a line every 10 s, until
    cancelled."""
    stub = scheduler_pb2_grpc.SchedulerStub(scheduler)
    if not sys.stderr.isatty():
        return await _tell_throughput(stub, scrape)
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        async with background(_tell_throughput(stub, scrape)):
            while True:
                try:
                    fleet = await stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=ASK_S)
                    live.update(Text(describe(fleet), style="dim"), refresh=True)
                except aio.AioRpcError as error:
                    live.update(Text(f"scheduler: {error.details()}", style="red"), refresh=True)
                await asyncio.sleep(EVERY_S)


async def _tell_throughput(stub: "scheduler_pb2_grpc.SchedulerAsyncStub", scrape: Scrape) -> None:
    """Whoever is away has nothing to tell."""
    throughput, clock = Throughput(), asyncio.get_running_loop().time
    while True:
        try:
            fleet = await stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=ASK_S)
            line = throughput.look(clock(), totals_of(await scrape()), fleet)
        except aio.AioRpcError:
            line = ""
        if line:
            say(line)
        await asyncio.sleep(THROUGHPUT_S)


@asynccontextmanager
async def saying_what_is_left(count: Callable[[], Awaitable[int]]) -> AsyncIterator[None]:
    """While the block waits for answers that are still being given, say how many; nothing where
    there are none."""
    async with background(_say_what_is_left(count)):
        yield


async def _say_what_is_left(count: Callable[[], Awaitable[int]]) -> None:
    clock = asyncio.get_running_loop().time
    said, said_s = 0, clock()
    while True:
        left = await count()
        if left and (not said or (left != said and clock() - said_s > WAITS_SAY_S)):
            what = "request is" if left == 1 else "requests are"
            say(f"{left} {what} being answered; Ctrl-C again stops now")
            said, said_s = left, clock()
        await asyncio.sleep(WAITS_LOOK_S)


def live_of(scheduler: aio.Channel) -> Callable[[], Awaitable[int]]:
    """Of requests that run or wait, as a scheduler tells; 0 where it can't be asked."""
    stub = scheduler_pb2_grpc.SchedulerStub(scheduler)

    async def count() -> int:
        try:
            fleet = await stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=ASK_S)
        except aio.AioRpcError:
            return 0
        return sum(worker.running for worker in fleet.workers) + fleet.queued

    return count

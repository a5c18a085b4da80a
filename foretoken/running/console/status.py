"""What `foretoken serve` shows: one line when ready, a live one on a terminal, one every 10 s under
load, and what it waits for when it is left."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from grpc import aio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from foretoken.running.console.fleets import TIMEOUT_S, AskFleet
from foretoken.running.console.lines import print_line
from foretoken.running.console.throughput import INTERVAL_S as THROUGHPUT_S
from foretoken.running.console.throughput import ThroughputReport, kv_usage, parse_totals
from protos.generated import scheduler_pb2, scheduler_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from services.runtime.server import Lifecycle
from services.runtime.startup import process_age_s
from services.runtime.tasks import background

log = logging.getLogger(__name__)

REFRESH_S = 0.5
PREDICTOR_START_S = 30.0  # many times the usual start
DRAIN_POLL_S = 0.2
DRAIN_LINE_S = 5.0  # between two lines about the drain

Scrape = Callable[[], Awaitable[str]]  # returns the gateway's metrics as text


async def wait_for_workers(
    scheduler: aio.Channel, workers: Callable[[], int]
) -> scheduler_pb2.FleetView:
    """Returns the fleet once `workers()` workers have attached."""
    stub = scheduler_pb2_grpc.SchedulerStub(scheduler)
    while True:
        try:
            fleet = await stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=TIMEOUT_S)
            if len(fleet.workers) >= workers():
                return fleet
        except aio.AioRpcError:
            pass  # still starting; the supervisor ends this wait if the process exits
        await asyncio.sleep(0.05)


async def wait_until_healthy(url: str) -> None:
    """Returns once `/health` is 200: the gateway has a scheduler and a worker."""
    while not await _is_ok(url):  # noqa: ASYNC110 - polls another process
        await asyncio.sleep(0.02)


async def _is_ok(url: str) -> bool:
    """Whether the URL answers 200. Uses the event loop, so that no pool thread delays the exit."""
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            request = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
            writer.write(request.encode())
            return (await reader.readline()).split(b" ")[1:2] == [b"200"]
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()


async def wait_for_predictor(
    predictor: aio.Channel, lifecycle: Lifecycle, limit_s: float = PREDICTOR_START_S
) -> None:
    """Returns once the predictor is reachable, after `limit_s` with a warning, or on a signal.

    Serving does not need the predictor.
    """
    reached = asyncio.ensure_future(predictor.channel_ready())
    leaving = asyncio.ensure_future(lifecycle.draining.wait())
    try:
        await asyncio.wait({reached, leaving}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not (reached.done() or leaving.done()):
            log.warning(
                "the predictor is not reachable after %g s; until it is, forecasts use history",
                limit_s,
            )
    finally:
        for pending in (reached, leaving):
            pending.cancel()
        await asyncio.gather(reached, leaving, return_exceptions=True)


def ready_line(fleets: Sequence[scheduler_pb2.FleetView], http: str, grpc: str) -> str:
    """Describes the fleet of each model, and where clients reach them."""
    first = fleets[0]
    took = f"started in {process_age_s():.1f} s (a worker's {first.workers[0].start})"
    models = "; ".join(map(_describe_model, fleets))
    return f"foretoken is ready: {models}, policy {first.policy}, {took}, HTTP {http}, gRPC {grpc}"


def _describe_model(fleet: scheduler_pb2.FleetView) -> str:
    first = fleet.workers[0]
    workers = f"{len(fleet.workers)} worker(s) with {first.kv_tokens} KV tokens each"
    return f"{first.model}, {first.placement}, {workers}"


def format_fleet(fleet: scheduler_pb2.FleetView) -> str:
    running = sum(worker.running for worker in fleet.workers)
    return (
        f"{running} running · {fleet.queued} waiting · KV {kv_usage(fleet):.0%} · "
        f"{len(fleet.workers)} worker(s) · drains in {fleet.drain_s:.0f} s"
    )


def scrape_over(gateways: Sequence[aio.Channel]) -> Scrape:
    """Returns a function that reads the metrics of gateway processes, one text after the other. It
    leaves out the ones that do not answer, and raises AioRpcError if none does."""
    stubs = [telemetry_pb2_grpc.TelemetryStub(gateway) for gateway in gateways]

    async def ask(stub: "telemetry_pb2_grpc.TelemetryAsyncStub") -> str | aio.AioRpcError:
        try:
            return (await stub.Scrape(telemetry_pb2.ScrapeRequest(), timeout=TIMEOUT_S)).text
        except aio.AioRpcError as error:
            return error

    async def scrape() -> str:
        answers = await asyncio.gather(*map(ask, stubs))
        texts = [answer for answer in answers if isinstance(answer, str)]
        errors = [answer for answer in answers if not isinstance(answer, str)]
        if errors and not texts:
            raise errors[0]
        return "".join(texts)

    return scrape


async def show(ask_fleet: AskFleet, scrape: Scrape) -> None:
    """Shows a status line on a terminal, and a throughput line every 10 s under load."""
    if not sys.stderr.isatty():
        return await _report_throughput(ask_fleet, scrape)
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        async with background(_report_throughput(ask_fleet, scrape)):
            while True:
                try:
                    fleet = await ask_fleet()
                    live.update(Text(format_fleet(fleet), style="dim"), refresh=True)
                except aio.AioRpcError as error:
                    live.update(Text(f"scheduler: {error.details()}", style="red"), refresh=True)
                await asyncio.sleep(REFRESH_S)


async def _report_throughput(ask_fleet: AskFleet, scrape: Scrape) -> None:
    report, clock = ThroughputReport(), asyncio.get_running_loop().time
    while True:
        try:
            fleet = await ask_fleet()
            line = report.update(clock(), parse_totals(await scrape()), fleet)
        except aio.AioRpcError:
            line = ""
        if line:
            print_line(line)
        await asyncio.sleep(THROUGHPUT_S)


@asynccontextmanager
async def reporting_drain(count: Callable[[], Awaitable[int]]) -> AsyncIterator[None]:
    """Prints how many requests still run while the block drains."""
    async with background(_report_drain(count)):
        yield


async def _report_drain(count: Callable[[], Awaitable[int]]) -> None:
    clock = asyncio.get_running_loop().time
    reported, reported_s = 0, clock()
    while True:
        left = await count()
        if left and (not reported or (left != reported and clock() - reported_s > DRAIN_LINE_S)):
            what = "request is" if left == 1 else "requests are"
            print_line(f"{left} {what} still running; press Ctrl-C again to stop now")
            reported, reported_s = left, clock()
        await asyncio.sleep(DRAIN_POLL_S)


def live_counter(ask_fleet: AskFleet) -> Callable[[], Awaitable[int]]:
    """Returns a function that counts running and queued requests; 0 if no scheduler answers."""

    async def count() -> int:
        try:
            fleet = await ask_fleet()
        except aio.AioRpcError:
            return 0
        return sum(worker.running for worker in fleet.workers) + fleet.queued

    return count

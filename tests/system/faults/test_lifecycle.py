"""Cancelled, timed-out and rejected requests and a stopping server free all memory."""

import asyncio
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from foretoken import AsyncClient
from foretoken.client.answers import SamplingOptions
from foretoken.running.ports import free_port
from tests.live import Live, serving, wait_for
from tests.system.children import paused_workers_of

KV_TOKENS = 2_048
WORKER_PORT = free_port()
WORKER = f"http://127.0.0.1:{WORKER_PORT}"
LONG: SamplingOptions = {"max_tokens": 1_500, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(
        "--kv-tokens", str(KV_TOKENS), "--policy", "conservative",
        "--set", "scheduler.max_queue=3", "--set", f"worker.metrics_port={WORKER_PORT}",
        "--set", "gateway.metrics_wait_s=0.1",  # for a paused worker
    ) as system:  # fmt: skip
        yield system


def metric(http: str, name: str, labels: str = "") -> float:
    """The sum of the metric's series with these labels."""
    text = urllib.request.urlopen(f"{http}/metrics", timeout=10).read().decode()
    series = [x for x in text.splitlines() if x.startswith((f"{name} ", f"{name}{{"))]
    found = [float(x.split()[-1]) for x in series if labels in x]
    assert found, f"{http} has no metric {name}"
    return sum(found)


def queued(live: Live) -> float:
    return metric(live.http, "foretoken_scheduler_requests_waiting")


def held_blocks() -> float:
    """Blocks in use on the device, as the worker reports them."""
    return metric(WORKER, "foretoken_kv_blocks", 'state="held"')


def is_empty(live: Live) -> bool:
    """No request remains and all memory is free, according to every process."""
    of = ("scheduler_requests_waiting", "scheduler_requests_running", "num_requests_running",
          "num_requests_waiting")  # fmt: skip
    return held_blocks() == 0 and not sum(metric(live.http, f"foretoken_{name}") for name in of)


@asynccontextmanager
async def all_memory_taken(live: Live) -> AsyncIterator[AsyncClient]:
    """One request is admitted and later ones wait, because the worker is paused."""
    with paused_workers_of(live):
        async with AsyncClient(live.grpc) as client:
            running = client.generate("Count from 1 to 500.\n", **LONG)
            reading = asyncio.ensure_future(running.complete())
            admitted = "foretoken_scheduler_requests_running"
            await asyncio.to_thread(wait_for, lambda: metric(live.http, admitted) == 1)
            yield client
            running.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def post(live: Live, body: dict[str, object], **headers: str) -> urllib.request.Request:
    all_headers = {"content-type": "application/json", **headers}
    data = json.dumps({"model": "demo", **body}).encode()
    return urllib.request.Request(f"{live.http}/v1/completions", data, all_headers)


async def test_cancelled_grpc_call_frees_kv_blocks(live: Live):
    async with AsyncClient(live.grpc) as client:
        stream = client.generate("Count from 1 to 500.\n", **LONG)
        async for chunk in stream:
            assert chunk.text or chunk.token_ids
            break
        assert held_blocks() > 0
        stream.cancel()
        await asyncio.to_thread(wait_for, lambda: is_empty(live))


def test_closed_http_stream_frees_kv_blocks(live: Live):
    body = {"prompt": "Count from 1 to 500.\n", "stream": True, **LONG}
    with urllib.request.urlopen(post(live, body), timeout=10) as response:
        assert response.readline().startswith(b"data: ")
    wait_for(lambda: is_empty(live))


async def test_disconnected_client_leaves_the_queue(live: Live):
    async with all_memory_taken(live) as client:
        waiting = client.generate("Count from 1 to 500.\n", **LONG)
        reading = asyncio.ensure_future(anext(aiter(waiting)))
        await asyncio.to_thread(wait_for, lambda: queued(live) == 1)
        waiting.cancel()
        await asyncio.to_thread(wait_for, lambda: queued(live) == 0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await asyncio.to_thread(wait_for, lambda: is_empty(live))


async def test_deadline_in_the_queue_returns_504(live: Live):
    async with all_memory_taken(live):
        late = post(live, {"prompt": "Copy: a\n", **LONG}, **{"x-request-timeout-s": "0.2"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(urllib.request.urlopen, late)
        assert refused.value.code == 504
    await asyncio.to_thread(wait_for, lambda: is_empty(live))


async def test_deadline_while_running_is_a_finish_reason(live: Live):
    async with AsyncClient(live.grpc) as client:
        chunks = aiter(client.generate("Count to 9.\n", timeout_s=2, **LONG))
        assert (await anext(chunks)).token_ids
        with paused_workers_of(live):
            assert [chunk.finish_reason async for chunk in chunks][-1] == "deadline"
        await asyncio.to_thread(wait_for, lambda: is_empty(live))


async def test_full_queue_returns_429_with_retry_after(live: Live):
    async with all_memory_taken(live) as client:
        streams = [client.generate("Count from 1 to 500.\n", **LONG) for _ in range(3)]
        reads = [asyncio.ensure_future(stream.complete()) for stream in streams]
        await asyncio.to_thread(wait_for, lambda: queued(live) == 3)
        with pytest.raises(urllib.error.HTTPError) as refused:
            body = {"prompt": "Copy: a\n", "max_tokens": 4}
            await asyncio.to_thread(urllib.request.urlopen, post(live, body))
        assert refused.value.code == 429
        assert float(refused.value.headers["Retry-After"]) >= 1
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
    await asyncio.to_thread(wait_for, lambda: is_empty(live))


@pytest.mark.slow
async def test_first_sigterm_drains():
    with serving() as live:
        async with AsyncClient(live.grpc) as client:
            stream = client.generate("Count from 1 to 500.\n", **LONG)
            chunks = aiter(stream)
            await anext(chunks)
            with paused_workers_of(live):
                live.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(wait_for, lambda: _health(live) == 503)
                with pytest.raises(urllib.error.HTTPError) as refused:
                    body = {"prompt": "Copy: a\n", "max_tokens": 4}
                    await asyncio.to_thread(urllib.request.urlopen, post(live, body))
                assert refused.value.code == 503
            assert [chunk.finish_reason async for chunk in chunks][-1] == "length"
        assert await asyncio.to_thread(live.process.wait, 30) == 0


@pytest.mark.slow
async def test_second_sigterm_stops_at_once():
    with serving() as live:
        async with AsyncClient(live.grpc) as client:
            stream = client.generate("Count from 1 to 500.\n", **LONG)
            chunks = aiter(stream)
            await anext(chunks)
            live.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            began = time.monotonic()
            live.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(live.process.wait, 30) == 0
            assert time.monotonic() - began < 20  # far under the 30 s of a drain
            stream.cancel()


def _health(live: Live) -> int:
    try:
        return int(urllib.request.urlopen(f"{live.http}/health", timeout=5).status)
    except urllib.error.HTTPError as error:
        return error.code

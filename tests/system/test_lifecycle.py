"""Requests that end before their time, and a system that stops: all memory comes back."""

import asyncio
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from foretoken import AsyncClient
from foretoken.answers import SamplingOptions
from tests.live import Live, serving, wait_for

KV_TOKENS = 2_048
LONG: SamplingOptions = {"max_tokens": 1_500, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(
        "--kv-tokens", str(KV_TOKENS), "--set", "scheduler.max_queue=3", "--policy", "conservative"
    ) as system:
        yield system


def metric(live: Live, name: str) -> float:
    text = urllib.request.urlopen(f"{live.http}/metrics", timeout=10).read().decode()
    return sum(float(x.split()[-1]) for x in text.splitlines() if x.startswith(name))


def is_empty(live: Live) -> bool:
    return (
        metric(live, "foretoken_kv_free_tokens") == KV_TOKENS
        and metric(live, "foretoken_scheduler_requests") == 0
        and metric(live, "foretoken_num_requests") == 0
    )


def post(live: Live, body: dict[str, object], **headers: str) -> urllib.request.Request:
    all_headers = {"content-type": "application/json", **headers}
    data = json.dumps({"model": "demo", **body}).encode()
    return urllib.request.Request(f"{live.http}/v1/completions", data, all_headers)


async def test_a_cancelled_call_frees_its_blocks(live: Live):
    async with AsyncClient(live.grpc) as client:
        stream = client.generate("Count from 1 to 500.\n", **LONG)
        async for chunk in stream:
            assert chunk.text or chunk.token_ids
            break
        assert metric(live, "foretoken_kv_free_tokens") <= KV_TOKENS
        stream.cancel()
        await asyncio.to_thread(wait_for, lambda: is_empty(live))


def test_a_browser_that_closes_its_stream_frees_its_blocks(live: Live):
    body = {"prompt": "Count from 1 to 500.\n", "stream": True, **LONG}
    with urllib.request.urlopen(post(live, body), timeout=10) as response:
        assert response.readline().startswith(b"data: ")
    wait_for(lambda: is_empty(live))


async def test_a_client_that_goes_while_queued_leaves_the_queue(live: Live):
    async with AsyncClient(live.grpc) as client:
        running = client.generate("Count from 1 to 500.\n", **LONG)
        chunks = aiter(running)
        await anext(chunks)
        waiting = client.generate("Count from 1 to 500.\n", **LONG)
        reading = asyncio.ensure_future(anext(aiter(waiting)))
        await asyncio.to_thread(
            wait_for, lambda: metric(live, "foretoken_scheduler_requests_waiting") == 1
        )
        waiting.cancel()
        await asyncio.to_thread(
            wait_for, lambda: metric(live, "foretoken_scheduler_requests_waiting") == 0
        )
        running.cancel()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await asyncio.to_thread(wait_for, lambda: is_empty(live))


async def test_a_deadline_in_the_queue_is_a_504_and_while_running_a_finish_reason(live: Live):
    async with AsyncClient(live.grpc) as client:
        running = client.generate("Count from 1 to 500.\n", timeout_s=1.0, **LONG)
        chunks = aiter(running)
        assert (await anext(chunks)).token_ids
        late = post(live, {"prompt": "Copy: a\n", **LONG}, **{"x-request-timeout-s": "0.2"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(urllib.request.urlopen, late)
        assert refused.value.code == 504
        assert [chunk.finish_reason async for chunk in chunks][-1] == "deadline"
        await asyncio.to_thread(wait_for, lambda: is_empty(live))


async def test_a_full_queue_is_a_429_that_says_when_to_come_back(live: Live):
    async with AsyncClient(live.grpc) as client:
        running = client.generate("Count from 1 to 500.\n", **LONG)
        chunks = aiter(running)
        await anext(chunks)  # it runs; the others find its memory taken
        streams = [client.generate("Count from 1 to 500.\n", **LONG) for _ in range(3)]
        reads = [asyncio.ensure_future(stream.complete()) for stream in streams]
        await asyncio.to_thread(
            wait_for, lambda: metric(live, "foretoken_scheduler_requests_waiting") == 3
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            body = {"prompt": "Copy: a\n", "max_tokens": 4}
            await asyncio.to_thread(urllib.request.urlopen, post(live, body))
        assert refused.value.code == 429
        assert float(refused.value.headers["Retry-After"]) >= 1
        for stream in (running, *streams):
            stream.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        await asyncio.to_thread(wait_for, lambda: is_empty(live))


async def test_the_first_sigterm_lets_answers_end_and_refuses_new_ones():
    with serving() as live:
        async with AsyncClient(live.grpc) as client:
            stream = client.generate(
                "Count from 1 to 500.\n", max_tokens=600, ignore_eos=True, temperature=0.0
            )
            chunks = aiter(stream)
            await anext(chunks)
            live.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(wait_for, lambda: _health(live) == 503)
            with pytest.raises(urllib.error.HTTPError) as refused:
                body = {"prompt": "Copy: a\n", "max_tokens": 4}
                await asyncio.to_thread(urllib.request.urlopen, post(live, body))
            assert refused.value.code == 503
            assert [chunk.finish_reason async for chunk in chunks][-1] == "length"
        assert await asyncio.to_thread(live.process.wait, 30) == 0


async def test_the_second_sigterm_stops_at_once():
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

"""While texts are tokenized, streams continue, and a disconnect frees its slot."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from foretoken import AsyncClient
from gateway.requests.reading_pool import LARGE_BYTES
from gateway.requests.text import Text
from protos.generated.worker_pb2 import Prompt
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of

ENDLESS = tokens_of("1") * 400


def answer(prompt: Prompt) -> Sequence[int]:
    return ENDLESS


@dataclass
class SlowText:
    """A text with a tokenization that lasts until the test releases it."""

    started: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    read: list[str] = field(default_factory=list)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Any:
    made, encode = SlowText(), Text.encode

    def encoding(self: Text, text: str, special: bool = True) -> list[int]:
        made.read.append(text[:8])
        if "slow" in text:
            made.started.set()
            assert made.released.wait(30)
        return encode(self, text, special)

    monkeypatch.setattr(Text, "encode", encoding)
    yield made
    made.released.set()


def ask(harness: Harness, prompt: str, tokens: int = 3) -> "asyncio.Task[Any]":
    body = {"prompt": prompt, "max_tokens": tokens}
    return asyncio.ensure_future(harness.http("POST", "/v1/completions", body))


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(answer) as made:
        yield made


async def test_slow_text_does_not_delay_others(harness: Harness, slow: SlowText) -> None:
    async with AsyncClient(harness.grpc_address) as client:
        stream = client.generate("stream", max_tokens=300)
        chunks = aiter(stream)
        await anext(chunks)
        reading = ask(harness, "slow")
        await harness.until(slow.started.is_set)
        for _ in range(3):  # the stream continues
            await anext(chunks)
        assert (await harness.http("GET", "/ping")).status == 200
        assert (await ask(harness, "other")).status == 200  # the other thread reads it
        assert not reading.done()
        slow.released.set()
        assert (await reading).status == 200
        stream.cancel()


async def test_one_thread_reads_in_order_and_a_full_queue_is_429(slow: SlowText) -> None:
    async with run_harness(answer, reading_threads=1, max_reading=1) as harness:
        first = ask(harness, "slow")
        await harness.until(slow.started.is_set)
        second = ask(harness, "second")
        pool = harness.gateway.intake._reading
        await harness.until(lambda: pool.waiting == 1)
        refused = await ask(harness, "third")
        assert (refused.status, refused.json["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        registry = harness.gateway.metrics.registry
        assert registry.get_sample_value("foretoken_refusals_total", {"reason": "reading"}) == 1
        slow.released.set()
        assert ((await first).status, (await second).status) == (200, 200)
        assert slow.read == ["slow", "second"]


async def send_request(harness: Harness, prompt: str) -> asyncio.StreamWriter:
    """A request with a client that can disconnect."""
    host, port = harness.http_url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": prompt}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    return writer


async def test_disconnect_while_waiting_frees_the_place(slow: SlowText) -> None:
    async with run_harness(answer, reading_threads=1) as harness:
        pool = harness.gateway.intake._reading
        first = ask(harness, "slow")
        await harness.until(slow.started.is_set)
        writer = await send_request(harness, "gone")
        await harness.until(lambda: pool.waiting == 1)
        writer.close()
        await harness.until(lambda: pool.waiting == 0)
        async with AsyncClient(harness.grpc_address) as client:
            stream = client.generate("gone, too")
            reading = asyncio.ensure_future(stream.complete())
            await harness.until(lambda: pool.waiting == 1)
            stream.cancel()
            await harness.until(lambda: pool.waiting == 0)
            await asyncio.gather(reading, return_exceptions=True)
        slow.released.set()
        assert (await first).status == 200
        assert slow.read == ["slow"]


async def test_prompt_too_long_by_bytes_is_not_tokenized(harness: Harness, slow: SlowText) -> None:
    long = "1," * LARGE_BYTES
    for path, body, field_name in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": ["1,", long]}, "prompt"),
        ("/v1/completions", {"prompt": [7] * LARGE_BYTES}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
    ):
        reply = await harness.http("POST", path, body)
        assert (reply.status, reply.json["error"]["param"]) == (400, field_name)
        assert "maximum context length is 512 tokens" in reply.json["error"]["message"]
    assert long[:8] not in slow.read


async def test_short_texts_can_be_read_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []
    encode = Text.encode

    def encoding(self: Text, text: str, special: bool = True) -> list[int]:
        seen.append((len(text), threading.current_thread() is threading.main_thread()))
        return encode(self, text, special)

    monkeypatch.setattr(Text, "encode", encoding)
    async with run_harness(answer, read_at_once_bytes=8) as harness:
        for length in (8, 9):
            assert (await ask(harness, "1," * 4 + "1" * (length - 8))).status == 200
    assert seen == [(8, True), (9, False)]


@pytest.mark.slow
async def test_streams_continue_while_long_texts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts of 1 MiB and eight streams: each stream has tokens during each tokenization.
    Tokenization on the event loop would block them all."""
    events: list[tuple[str, int]] = []
    encode = Text.encode

    def telling(self: Text, text: str, special: bool = True) -> list[int]:
        long = len(text) > LARGE_BYTES
        events.append(("begin" if long else "short", 0))
        ids = encode(self, text, special)
        events.append(("end" if long else "short", 0))
        return ids

    monkeypatch.setattr(Text, "encode", telling)
    async with run_harness(answer, max_body_bytes=2**23) as harness:
        harness.worker.step_s = 0.05
        wide = harness.scheduler.fleet([harness.scheduler.worker_address])
        for worker in wide.fleet.workers:
            worker.kv_tokens = worker.max_context_tokens = 10**8
        harness.scheduler.streams[-1].put_nowait(wide)
        await harness.until(lambda: harness.gateway.max_context_tokens == 10**8)
        async with AsyncClient(harness.grpc_address) as client:

            async def stream(number: int) -> None:
                async for _ in client.generate("1,", max_tokens=400):
                    events.append(("token", number))  # noqa: PERF401 - in order of arrival

            streams = [asyncio.ensure_future(stream(number)) for number in range(8)]
            await harness.until(lambda: {n for kind, n in events if kind == "token"} == {*range(8)})
            text = "sort the words, please: " * 2**16
            replies = await asyncio.gather(*(ask(harness, text[: 2**20], 1) for _ in range(4)))
            for each in streams:
                each.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    assert [reply.status for reply in replies] == [200] * 4
    started = [at for at, (kind, _) in enumerate(events) if kind == "begin"]
    ended = [at for at, (kind, _) in enumerate(events) if kind == "end"]
    assert len(started) == len(ended) == 4
    for begin, end in zip(started, ended, strict=True):
        seen = {number for kind, number in events[begin:end] if kind == "token"}
        assert seen == {*range(8)}
    assert all(first < second for first, second in pairwise(started))

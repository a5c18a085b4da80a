"""Admission: refused requests are not read, and admitted ones wait in order."""

import asyncio
from collections.abc import Coroutine
from itertools import pairwise
from math import inf

import pytest

from foretoken import AsyncClient, Overloaded
from gateway.admission.admission_control import AdmissionControl
from gateway.admission.tokenization_queue import CALM_TURNS, TokenizationQueue
from gateway.peers.fleet import Fleet
from gateway.requests.text import Text
from gateway.types.errors import MIN_RETRY_S, RefusalReason, RequestRefused
from protos.generated.worker_pb2 import Prompt
from services.runtime.tasks import background
from tests.gateway.gateway_fakes import Harness, run_harness
from tests.gateway.gateway_fixtures import IDS, WORDS

ADMISSION = AdmissionControl(max_sessions=10, max_queued=100)


@pytest.mark.parametrize(
    ("wanted", "timeout_s", "running", "queued", "drain_s", "age_s", "reason", "retry_after_s"),
    [
        (5, inf, 0, 0, 0.0, 0.0, None, 0.0),
        (6, inf, 0, 0, 0.0, 0.0, RefusalReason.SESSIONS, 1.0),
        (6, inf, 3, 5, 7.0, 2.0, RefusalReason.SESSIONS, 5.0),
        (1, inf, 3, 99, 50.0, 0.0, None, 0.0),
        (1, inf, 3, 100, 50.0, 0.0, RefusalReason.QUEUE, 50.0),
        (1, inf, 3, 100, 50.0, 20.0, RefusalReason.QUEUE, 30.0),
        (1, inf, 3, 100, 50.0, 50.0, None, 0.0),  # the reported drain time has passed
        (1, 8.0, 3, 9, 7.9, 0.0, None, 0.0),
        (1, 8.0, 3, 9, 20.0, 0.0, RefusalReason.DEADLINE, 12.0),
        (1, 8.0, 3, 9, 20.0, 11.5, RefusalReason.DEADLINE, 1.0),
        (1, 8.0, 3, 9, 20.0, 12.0, None, 0.0),
        (1, 8.0, 3, 3, 20.0, 0.0, None, 0.0),  # not more wait than run
        (1, 8.0, 3, 4, 20.0, 0.0, RefusalReason.DEADLINE, 12.0),
        (1, 8.0, 0, 0, 20.0, 0.0, None, 0.0),
        (1, -0.1, 3, 9, 20.0, 0.0, RefusalReason.DEADLINE, 20.0),
        (1, -0.1, 3, 9, 0.0, 0.0, None, 0.0),  # too late without the queue: a 504
    ],
)
def test_admission_control_refuses_by_capacity_deadline_and_report_age(
    wanted: int, timeout_s: float, running: int, queued: int, drain_s: float, age_s: float,
    reason: RefusalReason | None, retry_after_s: float,
) -> None:  # fmt: skip
    fleet = Fleet(running=running, queued=queued, drain_s=drain_s, reported_s=1000.0)
    refused = ADMISSION.find_refusal(5, wanted, timeout_s, fleet, 1000.0 + age_s)
    assert (refused.reason if refused else None) == reason
    assert (refused.retry_after_s if refused else 0.0) == pytest.approx(retry_after_s)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that were tokenized."""
    prompts: list[str] = []
    encode = Text.encode

    def recording(self: Text, text: str, add_special_tokens: bool = True) -> list[int]:
        prompts.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Text, "encode", recording)
    return prompts


def refusals(harness: Harness, reason: str) -> float | None:
    registry = harness.gateway.metrics.registry
    return registry.get_sample_value("foretoken_refusals_total", {"reason": reason})


def answer(prompt: Prompt) -> list[int]:
    return IDS


async def test_request_that_would_miss_its_deadline_is_refused_unread(read: list[str]) -> None:
    made = run_harness(answer, queue=(70, 1000.0))
    async with made as harness, AsyncClient(harness.grpc_address) as client:
        with pytest.raises(Overloaded, match=r"^70 requests wait, about \d+\.\d s") as caught:
            await client.complete("late", timeout_s=30)
        assert 900 < caught.value.retry_after_s < 1000
        headers = {"x-request-timeout-s": "30"}
        for path, body in (
            ("/v1/completions", {"prompt": "late"}),
            ("/v1/completions", {"prompt": "late", "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "late"}]}),
            ("/v1/completions", b"no JSON, but that would have to be read"),
        ):
            reply = await harness.http("POST", path, body, headers)
            assert (reply.status, reply.json["error"]["code"]) == (429, "queue_full")
            assert 900 < int(reply.headers["retry-after"]) <= 1000
        assert (read, harness.scheduler.requests) == ([], [])
        assert refusals(harness, "deadline") == 5
        assert (await client.complete("1,", timeout_s=3000)).text == WORDS
        assert (await client.complete("2,")).text == WORDS
    assert read == ["1,", "2,"]


async def test_default_deadline_counts_for_admission(read: list[str]) -> None:
    made = run_harness(answer, queue=(70, 1000.0), default_deadline_s=10)
    async with made as harness, AsyncClient(harness.grpc_address) as client:
        with pytest.raises(Overloaded, match=r"this one may take (10\.0|\d\.\d) s; retry later"):
            await client.complete("late")
    assert read == []


async def test_full_scheduler_queue_refuses_requests(read: list[str]) -> None:
    made = run_harness(answer, queue=(70, 1000.0), max_queued=70)
    async with made as harness, AsyncClient(harness.grpc_address) as client:
        with pytest.raises(Overloaded, match="70 requests wait already; retry later"):
            await client.complete("1,")
        assert refusals(harness, "queue") == 1
    assert read == []


async def test_full_session_table_refuses_requests_unread(read: list[str]) -> None:
    async with run_harness(max_sessions=4) as harness, AsyncClient(harness.grpc_address) as client:
        pending = asyncio.ensure_future(client.complete("1,", n=2))
        await harness.until(lambda: len(harness.worker.prompts) == 2)
        with pytest.raises(Overloaded):
            await client.complete("2,", n=3)
        body = {"prompt": ["3,"] * 3}
        assert (await harness.http("POST", "/v1/completions", body)).status == 429
        reply = await harness.http("POST", "/v1/completions", {"prompt": "4,", "n": 3})
        assert reply.status == 429
        assert (read, refusals(harness, "sessions")) == (["1,"], 3)
        pending.cancel()


def ends_at_once(entering: Coroutine[None, None, None]) -> bool:
    """Whether the coroutine ends without a turn of the loop."""
    try:
        entering.send(None)
    except StopIteration:
        return True
    entering.close()
    return False


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_tokenization_queue_admits_a_single_request_at_once() -> None:
    queue = TokenizationQueue(max_waiting=8, hold_s=1000.0, burst_s=0.0, burst_requests=1)
    for _ in range(5):
        assert ends_at_once(queue.wait_for_turn())
        await turns(CALM_TURNS + 1)


async def test_tokenization_queue_admits_one_by_one_in_order() -> None:
    queue = TokenizationQueue(max_waiting=8, hold_s=1000.0, burst_s=0.0, burst_requests=1)
    admitted: list[tuple[int, int]] = []  # request number, turn
    now = 0

    async def arrive(number: int) -> None:
        await queue.wait_for_turn()
        admitted.append((number, now))

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(arrive(number))
        while len(admitted) < 5:
            await asyncio.sleep(0)
            now += 1
    assert [number for number, _ in admitted] == [0, 1, 2, 3, 4]
    gaps = [b[1] - a[1] for a, b in pairwise(admitted)]
    assert min(gaps) >= CALM_TURNS


@pytest.mark.parametrize(("hold_s", "admitted"), [(1000.0, False), (1e-9, True)])
async def test_tokenization_queue_lets_tokens_go_first_for_a_bounded_time(
    hold_s: float, admitted: bool
) -> None:
    queue = TokenizationQueue(max_waiting=8, hold_s=hold_s, burst_s=0.0, burst_requests=1)
    await queue.wait_for_turn()
    waiting = asyncio.ensure_future(queue.wait_for_turn())
    for _ in range(10 * CALM_TURNS):
        queue.on_tokens()
        await asyncio.sleep(0)
    assert waiting.done() is admitted
    await turns(CALM_TURNS + 2)
    assert waiting.done()


async def test_tokenization_queue_admits_a_burst_of_short_prompts() -> None:
    queue = TokenizationQueue(max_waiting=8, hold_s=1000.0, burst_s=1000.0)
    await queue.wait_for_turn()
    waiting = [asyncio.ensure_future(queue.wait_for_turn()) for _ in range(5)]
    for _ in range(8):  # one per turn, although tokens arrive all the time
        queue.on_tokens()
        await asyncio.sleep(0)
    assert all(each.done() for each in waiting)


async def test_tokenization_queue_admits_some_in_a_burst_that_one_turn_exceeds() -> None:
    queue = TokenizationQueue(max_waiting=8, hold_s=1000.0, burst_s=0.0, burst_requests=3)
    await queue.wait_for_turn()
    waiting = [asyncio.ensure_future(queue.wait_for_turn()) for _ in range(5)]
    for _ in range(8):
        queue.on_tokens()
        await asyncio.sleep(0)
    assert [each.done() for each in waiting] == [True, True, False, False, False]
    await turns(CALM_TURNS + 5)
    assert all(each.done() for each in waiting)


async def test_full_tokenization_queue_has_a_retry_time() -> None:
    queue = TokenizationQueue(max_waiting=2, hold_s=1000.0, burst_s=0.0, burst_requests=1)
    await queue.wait_for_turn()
    loop = asyncio.get_running_loop()
    waiting = asyncio.ensure_future(queue.wait_for_turn())
    began_s = loop.time()
    while loop.time() < began_s + MIN_RETRY_S + 0.1:
        queue.on_tokens()
        await asyncio.sleep(0)
    queue.check()  # one more place is free
    last = asyncio.ensure_future(queue.wait_for_turn())
    queue.on_tokens()
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused) as refused:
        queue.check()
    assert MIN_RETRY_S + 0.1 <= (refused.value.retry_after_s or 0) <= loop.time() - began_s + 0.1
    await asyncio.gather(waiting, last)


async def test_tokenization_queue_refuses_while_its_oldest_request_has_waited_too_long() -> None:
    queue = TokenizationQueue(
        max_waiting=8, hold_s=1000.0, burst_s=0.0, max_wait_s=1e-9, burst_requests=1
    )
    await queue.wait_for_turn()
    waiting = asyncio.ensure_future(queue.wait_for_turn())
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused, match="1 requests wait for tokenization"):
        queue.check()
    waiting.cancel()
    await asyncio.sleep(0)
    queue.check()  # a cancelled request does not wait


async def test_tokenization_queue_skips_cancelled_request() -> None:
    queue = TokenizationQueue(max_waiting=8, hold_s=1000.0, burst_s=0.0, burst_requests=1)
    await queue.wait_for_turn()
    first, second = (asyncio.ensure_future(queue.wait_for_turn()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    assert queue.waiting == 1
    await turns(CALM_TURNS + 2)
    assert (first.cancelled(), second.done()) == (True, True)


async def test_waiting_requests_are_bounded(read: list[str]) -> None:
    async with run_harness(answer, max_arriving=1) as harness:
        gateway = harness.gateway
        await gateway.intake.wait_for_turn()
        waiting = asyncio.ensure_future(gateway.intake.wait_for_turn())
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused, match="1 requests wait for tokenization; retry later"):
            gateway.intake.admit()
        with pytest.raises(RequestRefused):
            await gateway.intake.wait_for_turn()
        await waiting
        assert refusals(harness, "arriving") == 2
        assert (await harness.http("POST", "/v1/completions", {"prompt": "1,"})).status == 200
    assert read == ["1,"]


async def test_request_of_a_client_that_left_leaves_the_tokenization_queue(read: list[str]) -> None:
    async with run_harness(answer, arriving_hold_s=1000.0) as harness:
        intake = harness.gateway.intake

        async def send_tokens() -> None:
            while True:  # each turn, so that only the requests of one burst are admitted
                intake.on_tokens()
                await asyncio.sleep(0)

        async with background(send_tokens()):
            host, port = harness.http_url.removeprefix("http://").split(":")
            body = b'{"prompt": "1,"}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
            clients = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
            for _, writer in clients:
                writer.write(head % len(body) + body)
            await harness.until(lambda: harness.gateway.arriving > 0 and len(read) > 0)
            for _, writer in clients:
                writer.close()
            await harness.until(lambda: not harness.gateway.arriving)
        assert len(read) < len(clients)

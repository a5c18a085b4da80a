"""Requests that end without a complete answer: cancelled, refused, too late, failed."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc import aio

from foretoken import (
    AsyncClient,
    DeadlineExceeded,
    ForetokenError,
    InvalidRequest,
    Overloaded,
    ServerError,
    Unavailable,
)
from gateway.faces.grpc.decode import decode_request
from protos.generated import common_pb2 as common
from protos.generated import gateway_pb2, gateway_pb2_grpc
from protos.generated import scheduler_pb2 as sched
from services.core import FinishReason
from services.runtime.network.channel import connect
from tests.gateway.gateway_fakes import Harness, run_harness
from tests.gateway.gateway_fixtures import IDS, STOP, WORDS, first_prompt
from tests.gateway.gateway_fixtures import client as client
from tests.gateway.gateway_fixtures import harness as harness

REQUEST = gateway_pb2.GenerateRequest(prompt="1,")


async def test_client_cancellation_reaches_the_scheduler(
    harness: Harness, client: AsyncClient
) -> None:
    stream = client.generate("1,")
    reading = asyncio.ensure_future(stream.complete())
    name = await first_prompt(harness)
    harness.worker.send(name, 0, IDS[:2])
    await harness.until(lambda: harness.gateway.metrics.generation_tokens._value.get() == 2)
    stream.cancel()
    await harness.until(lambda: bool(harness.scheduler.cancels))
    await reading
    expected = sched.CancelRequest(
        request_id=name, reason=common.FINISH_REASON_CANCELLED, output_tokens=2
    )
    assert list(harness.scheduler.cancels) == [expected]
    assert harness.gateway.live == 0


async def test_disconnect_while_queued_cancels(harness: Harness) -> None:
    harness.scheduler.place = False
    async with AsyncClient(harness.grpc_address) as client:
        reading = asyncio.ensure_future(client.complete("1,", n=3))
        await harness.until(lambda: len(harness.scheduler.requests) == 3)
        reading.cancel()
        await harness.until(lambda: len(harness.scheduler.cancels) == 3)
    assert harness.gateway.live == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_http_disconnect_cancels(harness: Harness, stream: bool) -> None:
    host, port = harness.http_url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt": "1,", "stream": %s}' % (b"true" if stream else b"false")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    name = await first_prompt(harness)
    harness.worker.send(name, 0, IDS[:2])
    await harness.until(lambda: harness.gateway.metrics.generation_tokens._value.get() == 2)
    writer.close()
    await harness.until(lambda: bool(harness.scheduler.cancels))
    assert harness.scheduler.cancels[0].request_id == name
    assert harness.gateway.live == 0


async def test_stalled_client_is_disconnected() -> None:
    async with run_harness(client_stall_s=0.2) as harness:
        call = await harness.gateway.open(
            [
                await harness.gateway.intake.parse(
                    decode_request(REQUEST), harness.gateway.intake.admit()
                )
            ]
        )
        chunks = call.chunks()

        async def write() -> None:
            await anext(chunks)
            await asyncio.Event().wait()  # the socket's client reads nothing more

        writer = asyncio.ensure_future(write())
        name = await first_prompt(harness)
        harness.worker.send(name, 0, IDS[:2])
        await harness.until(lambda: call.writer is not None and call.taken_s > 0)
        harness.worker.send(name, 2, IDS[2:4])
        await harness.until(lambda: bool(harness.scheduler.cancels))
        with pytest.raises(asyncio.CancelledError):
            await writer
        assert harness.gateway.live == 0


@pytest.mark.parametrize(
    ("refusal", "kind", "complaint", "retry_after_s"),
    [
        (sched.REJECT_REASON_QUEUE_FULL, Overloaded, "1000 wait", 7.5),
        (
            sched.REJECT_REASON_TOO_LONG,
            InvalidRequest,
            "maximum context length is exceeded: 1000 wait",
            0.0,
        ),
        (sched.REJECT_REASON_UNSPECIFIED, Unavailable, "1000 wait", 7.5),
        (sched.REJECT_REASON_TOO_LATE, Overloaded, "1000 wait", 7.5),
        (sched.REJECT_REASON_NO_MODEL, InvalidRequest, "1000 wait", 0.0),
    ],
)
async def test_scheduler_rejection_becomes_a_status(
    harness: Harness, client: AsyncClient, refusal: sched.RejectReason.ValueType,
    kind: type[Exception], complaint: str, retry_after_s: float,
) -> None:  # fmt: skip
    rejected = sched.Rejected(reason=refusal, message="1000 wait", retry_after_s=7.5)
    harness.scheduler.answers = lambda _: sched.RequestEvent(rejected=rejected)
    with pytest.raises(kind, match=complaint) as caught:
        await client.complete("1,")
    assert isinstance(caught.value, ForetokenError)
    assert caught.value.retry_after_s == retry_after_s


async def test_live_choices_are_bounded() -> None:
    made = run_harness(max_sessions=3, queue=(1, 1000.0))
    async with made as harness, AsyncClient(harness.grpc_address) as client:
        pending = asyncio.ensure_future(client.complete("1,", n=2))
        await harness.until(lambda: len(harness.worker.prompts) == 2)
        with pytest.raises(Overloaded, match="all 3 sessions are in use") as caught:
            await client.complete("1,", n=2)
        assert 900 < caught.value.retry_after_s <= 1000
        reply = await harness.http("POST", "/v1/completions", {"prompt": "1,", "n": 2})
        assert (reply.status, int(reply.headers["retry-after"]) > 900) == (429, True)
        for prompt in list(harness.worker.prompts):
            harness.worker.send(prompt.request_id, 0, IDS, STOP)
        assert [choice.text for choice in (await pending).choices] == [WORDS, WORDS]


async def test_draining_refuses_new_requests_and_waits_for_old_ones(
    harness: Harness, client: AsyncClient
) -> None:
    pending = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(harness)
    draining = asyncio.ensure_future(harness.gateway.drain())
    await harness.until(lambda: harness.gateway.draining)
    with pytest.raises(Unavailable, match="shutting down"):
        await client.complete("1,")
    reply = await harness.http("POST", "/v1/completions", {"prompt": "1,"})
    assert reply.status == 503
    assert (await harness.http("GET", "/health")).status == 503
    assert not draining.done()
    harness.worker.send(name, 0, IDS, STOP)
    assert (await pending).text == WORDS
    await draining


async def test_unparsable_message_is_invalid_argument(harness: Harness) -> None:
    async with connect(harness.grpc_address) as channel:
        call: Any = channel.unary_stream("/foretoken.v1.Gateway/Generate")
        for raw in (b"\x12\x02\xff\xfe", b"\xff"):
            with pytest.raises(aio.AioRpcError) as caught:
                async for _ in call(raw):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not harness.scheduler.requests


async def test_deadline_before_the_first_token_is_an_error(
    harness: Harness, client: AsyncClient
) -> None:
    finished = sched.Finished(reason=common.FINISH_REASON_DEADLINE)
    harness.scheduler.answers = lambda _: sched.RequestEvent(finished=finished)
    with pytest.raises(DeadlineExceeded, match="before the first token"):
        await client.complete("1,", timeout_s=30)


async def test_deadline_within_an_answer_keeps_its_tokens(
    harness: Harness, client: AsyncClient
) -> None:
    pending = asyncio.ensure_future(client.complete("1,", timeout_s=30))
    name = await first_prompt(harness)
    harness.worker.send(name, 0, IDS[:1])
    await harness.until(lambda: harness.gateway.metrics.generation_tokens._value.get() == 1)
    harness.scheduler.send_event(
        name, finished=sched.Finished(reason=common.FINISH_REASON_DEADLINE)
    )
    answer = await pending
    assert (answer.text, answer.finish_reason) == ("on", FinishReason.DEADLINE)


async def test_gateway_enforces_a_deadline_without_the_scheduler(
    harness: Harness, client: AsyncClient
) -> None:
    harness.scheduler.place = False
    with pytest.raises(DeadlineExceeded):
        await client.complete("1,", timeout_s=1)
    await harness.until(lambda: bool(harness.scheduler.cancels))
    assert harness.scheduler.cancels[0].reason == common.FINISH_REASON_DEADLINE


async def test_grpc_deadline_reaches_the_scheduler(harness: Harness) -> None:
    harness.scheduler.place = False
    async with connect(harness.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        call = stub.Generate(gateway_pb2.GenerateRequest(prompt="1,"), timeout=20)
        await harness.until(lambda: bool(harness.scheduler.requests))
        call.cancel()
    # gRPC rounds a timeout up on the wire, by about a hundredth at most.
    assert 10 < harness.scheduler.requests[0].deadline_in_s < 20 * 1.02


async def test_worker_failure_reaches_the_client(harness: Harness, client: AsyncClient) -> None:
    pending = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(harness)
    harness.worker.send(name, 0, (), common.FINISH_REASON_ERROR, "out of luck")
    with pytest.raises(ServerError, match="out of luck"):
        await pending


async def test_request_that_a_worker_refuses_is_invalid(
    harness: Harness, client: AsyncClient
) -> None:
    pending = asyncio.ensure_future(client.complete("1,"))
    harness.worker.refuse(await first_prompt(harness), "leave out prompt_logprobs")
    with pytest.raises(InvalidRequest, match="leave out prompt_logprobs"):
        await pending


FAILED = sched.Finished(reason=common.FINISH_REASON_ERROR)


async def test_reason_of_the_worker_may_follow_the_end_reported_by_the_scheduler(
    harness: Harness, client: AsyncClient
) -> None:
    pending = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(harness)
    harness.scheduler.send_event(name, finished=FAILED)
    (live,) = harness.gateway.sessions.table
    await harness.until(lambda: live.submission.pending_end is not None)
    harness.worker.refuse(name, "leave out prompt_logprobs")
    with pytest.raises(InvalidRequest, match="leave out prompt_logprobs"):
        await pending


async def test_failure_without_a_reason_ends_soon() -> None:
    async with (
        run_harness(finish_wait_s=0.1) as harness,
        AsyncClient(harness.grpc_address) as client,
    ):
        pending = asyncio.ensure_future(client.complete("1,"))
        harness.scheduler.send_event(await first_prompt(harness), finished=FAILED)
        (live,) = harness.gateway.sessions.table
        await harness.until(lambda: live.submission.pending_end is not None)
        with pytest.raises(ServerError, match="the request ended with error"):
            async with asyncio.timeout(10):
                await pending


async def test_failed_request_is_not_sent_again_when_its_worker_returns(
    harness: Harness, client: AsyncClient
) -> None:
    pending = asyncio.ensure_future(client.complete("1,"))
    harness.scheduler.send_event(await first_prompt(harness), finished=FAILED)
    (live,) = harness.gateway.sessions.table
    await harness.until(lambda: live.submission.pending_end is not None)
    harness.worker.break_stream()
    with pytest.raises(ServerError, match="the request ended with error"):
        await pending
    assert len(harness.scheduler.requests) == len(harness.worker.prompts) == 1

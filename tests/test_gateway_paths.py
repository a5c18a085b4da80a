"""The request path over real sockets: placement, loss and recovery, cancelling, bounds."""

import asyncio
from collections.abc import AsyncIterator
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
from protos import common_pb2 as common
from protos import gateway_pb2, gateway_pb2_grpc
from protos import scheduler_pb2 as sched
from services.core import FinishReason
from services.runtime.channel import connect
from services.runtime.server import listening
from tests.gateway_fakes import House, demo_text, housing, serves, tokens_of, works

STOP, LENGTH = common.FINISH_REASON_STOP, common.FINISH_REASON_LENGTH
WORDS = "one two three four five"
IDS = demo_text().encode(WORDS)
REQUEST = gateway_pb2.GenerateRequest(prompt="1,")


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """A gateway whose worker says nothing of itself: the test sends the tokens."""
    async with housing() as made:
        yield made


@pytest.fixture
async def client(house: House) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(house.grpc_address) as made:
        yield made


async def first_prompt(house: House) -> str:
    """The id of the first request, once its prompt is at the worker."""
    await house.until(lambda: bool(house.worker.prompts))
    return house.worker.prompts[0].request_id


async def test_what_scheduler_and_worker_are_told(house: House, client: AsyncClient) -> None:
    asking = asyncio.ensure_future(
        client.complete(
            messages=[{"role": "system", "content": "be kind"}, {"role": "user", "content": "1,"}],
            max_tokens=20, seed=5, temperature=0.5, stop="END", application="count",
            sla={"ttft_s": 0.5}, timeout_s=60,
        )
    )  # fmt: skip
    name = await first_prompt(house)
    house.worker.send(name, 0, IDS, STOP)
    assert (await asking).text == WORDS
    (request,) = house.scheduler.requests
    assert request.request_id == name
    assert (request.model, request.application) == ("demo", "count")
    assert (request.prompt_tokens, request.max_tokens, request.delivered_tokens) == (10, 20, 0)
    assert request.sla == common.Sla(name="custom", ttft_s=0.5)
    assert 0 <= request.age_s < 5
    assert 50 < request.deadline_in_s <= 60
    assert request.text == common.PromptText(instruction="be kind", user_input="1,")
    (prompt,) = house.worker.prompts
    assert len(prompt.token_ids) == prompt.prompt_tokens == 10
    assert prompt.sampling.seed == 5
    assert prompt.sampling.temperature == 0.5
    assert not prompt.sampling.stop
    assert house.scheduler.hellos and house.worker.opened == 1
    assert not house.scheduler.cancels


async def test_a_seed_is_drawn_where_none_was_given(house: House, client: AsyncClient) -> None:
    asking = [asyncio.ensure_future(client.complete("1,", n=2)) for _ in range(2)]
    await house.until(lambda: len(house.worker.prompts) == 4)
    for prompt in house.worker.prompts:
        house.worker.send(prompt.request_id, 0, IDS, STOP)
    await asyncio.gather(*asking)
    seeds: dict[str, list[int]] = {}
    for prompt in sorted(house.worker.prompts, key=lambda p: p.request_id):
        seeds.setdefault(prompt.request_id[:32], []).append(prompt.sampling.seed)
    (a, next_a), (b, next_b) = seeds.values()
    assert (next_a, next_b) == (a + 1, b + 1)
    assert a != b


async def test_repeated_tokens_are_delivered_once(house: House, client: AsyncClient) -> None:
    asking = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(house)
    house.worker.send(name, 0, IDS[:3])
    house.worker.send(name, 0, IDS[:5])
    house.worker.send(name, 4, IDS[4:], STOP)
    answer = await asking
    assert (answer.text, answer.choices[0].token_ids) == (WORDS, IDS)


async def test_an_evicted_request_goes_on_where_it_was(house: House, client: AsyncClient) -> None:
    asking = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(house)
    house.worker.send(name, 0, IDS[:3])
    await house.until(lambda: house.gateway.metrics.generation_tokens._value.get() == 3)
    house.scheduler.tell(name, preempted=sched.Preempted(output_tokens=3))
    house.scheduler.tell_placed(name)
    await house.until(lambda: len(house.worker.prompts) == 2)
    again = house.worker.prompts[1]
    assert list(again.token_ids[again.prompt_tokens :]) == IDS[:3]
    house.worker.send(name, 3, IDS[3:], STOP)
    assert (await asking).text == WORDS


async def test_a_request_swapped_in_goes_on_by_itself_and_its_gap_is_laid_to_the_swap(
    house: House, client: AsyncClient
) -> None:
    asking = asyncio.ensure_future(client.complete("1,", sla={"mtpot_s": 0.1}))
    name = await first_prompt(house)
    house.worker.send(name, 0, IDS[:3])
    await house.until(lambda: house.gateway.metrics.generation_tokens._value.get() == 3)
    house.scheduler.tell(name, preempted=sched.Preempted(output_tokens=3))
    await house.until(lambda: gauge(house, "running") == 0)
    house.scheduler.tell(name, resumed=sched.Resumed(held_tokens=16))
    await house.until(lambda: gauge(house, "running") == 1)
    await asyncio.sleep(0.3)  # the swap
    house.worker.send(name, 3, IDS[3:], STOP)
    assert (await asking).text == WORDS
    assert len(house.worker.prompts) == 1
    missed = {"class": "custom", "verdict": "missed", "cause": "swap-in"}
    registry = house.gateway.metrics.registry
    assert registry.get_sample_value("foretoken_sla_total", missed) == 1


def gauge(house: House, of: str) -> float | None:
    return house.gateway.metrics.registry.get_sample_value(f"foretoken_num_requests_{of}")


async def test_every_submission_of_a_request_has_its_cache_salt(
    house: House, client: AsyncClient
) -> None:
    asking = asyncio.ensure_future(client.complete("1,", n=2, cache_salt="tenant a"))
    other = asyncio.ensure_future(client.complete("1,"))
    await house.until(lambda: len(house.worker.prompts) == 3)
    house.worker.break_stream()
    await house.until(lambda: len(house.worker.prompts) == 6)
    for prompt in house.worker.prompts[3:]:
        house.worker.send(prompt.request_id, 0, IDS, STOP)
    await asyncio.gather(asking, other)
    for prompts in (house.worker.prompts[:3], house.worker.prompts[3:]):
        assert sorted(p.cache_salt for p in prompts) == ["", "tenant a", "tenant a"]


async def test_lost_tokens_make_a_new_attempt(house: House, client: AsyncClient) -> None:
    asking = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(house)
    house.worker.send(name, 0, IDS[:2])
    house.worker.send(name, 3, IDS[3:])
    await house.until(lambda: len(house.worker.prompts) == 2)
    again = house.worker.prompts[1]
    assert again.request_id != name
    assert [c.request_id for c in house.scheduler.cancels] == [name]
    assert house.scheduler.requests[1].delivered_tokens == 2
    house.worker.send(name, 2, tokens_of("nonsense"))
    house.worker.send(again.request_id, 2, IDS[2:], STOP)
    assert (await asking).text == WORDS


async def test_a_broken_worker_stream_makes_a_new_attempt_on_the_next(
    house: House, client: AsyncClient
) -> None:
    asking = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(house)
    house.worker.send(name, 0, IDS[:2])
    house.worker.break_stream()
    await house.until(lambda: len(house.worker.prompts) == 2)
    again = house.worker.prompts[1]
    assert again.request_id != name
    assert [c.request_id for c in house.scheduler.cancels] == [name]
    assert list(again.token_ids[again.prompt_tokens :]) == IDS[:2]
    assert again.sampling == house.worker.prompts[0].sampling
    house.worker.send(again.request_id, 2, IDS[2:], STOP)
    assert (await asking).text == WORDS
    assert house.worker.opened == 2


async def test_a_lost_workers_requests_go_on_elsewhere() -> None:
    async with housing() as house, AsyncClient(house.grpc_address) as client:
        asking = asyncio.ensure_future(client.complete("1,"))
        name = await first_prompt(house)
        house.worker.send(name, 0, IDS[:2])
        await house.until(lambda: house.gateway.metrics.generation_tokens._value.get() == 2)
        spare = type(house.worker)()
        async with listening([works(spare)], "127.0.0.1:0") as server:
            house.scheduler.worker_address = f"127.0.0.1:{server.port}"
            await house.worker_server.stop(0)
            await house.until(lambda: bool(spare.prompts))
            prompt = spare.prompts[0]
            assert house.scheduler.requests[-1].delivered_tokens == 2
            spare.send(prompt.request_id, 2, IDS[2:], STOP)
            assert (await asking).text == WORDS


async def test_the_scheduler_may_place_a_lost_workers_request_first() -> None:
    async with housing(connect_backoff_s=5) as house, AsyncClient(house.grpc_address) as client:
        asking = asyncio.ensure_future(client.complete("1,"))
        name = await first_prompt(house)
        spare = type(house.worker)()
        async with listening([works(spare)], "127.0.0.1:0") as server:
            await house.worker_server.stop(0)
            house.scheduler.tell_placed(name, f"127.0.0.1:{server.port}")
            await house.until(lambda: bool(spare.prompts))
            spare.send(name, 0, IDS, STOP)
            assert (await asking).text == WORDS
        assert len(house.scheduler.requests) == 1


async def test_an_answer_that_lacks_only_its_end_is_not_asked_for_again(
    house: House, client: AsyncClient
) -> None:
    asking = asyncio.ensure_future(client.complete("1,", max_tokens=3))
    name = await first_prompt(house)
    house.worker.send(name, 0, IDS[:3])
    house.worker.break_stream()
    answer = await asking
    assert (answer.choices[0].token_ids, answer.finish_reason) == (IDS[:3], FinishReason.LENGTH)
    assert len(house.scheduler.requests) == 1


async def test_a_lost_scheduler_gets_every_request_again(house: House, client: AsyncClient) -> None:
    asking = [asyncio.ensure_future(client.complete("1,")) for _ in range(2)]
    await house.until(lambda: len(house.worker.prompts) == 2)
    first, second = (prompt.request_id for prompt in house.worker.prompts)
    house.worker.send(first, 0, IDS[:2])
    await house.until(lambda: house.gateway.metrics.generation_tokens._value.get() == 2)
    house.scheduler.break_stream()
    await house.until(lambda: len(house.worker.prompts) == 4)
    resubmitted = {r.request_id: r for r in house.scheduler.requests[2:]}
    assert len(house.scheduler.hellos) == 2
    assert sorted(r.delivered_tokens for r in resubmitted.values()) == [0, 2]
    assert not resubmitted.keys() & {first, second}
    for prompt in house.worker.prompts[2:]:
        done = len(prompt.token_ids) - prompt.prompt_tokens
        assert resubmitted[prompt.request_id].delivered_tokens == done
        house.worker.send(prompt.request_id, done, IDS[done:], STOP)
    assert [answer.text for answer in await asyncio.gather(*asking)] == [WORDS, WORDS]


async def test_a_request_may_finish_while_the_scheduler_is_away(
    house: House, client: AsyncClient
) -> None:
    asking = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(house)
    await house.scheduler_server.stop(0)
    house.worker.send(name, 0, IDS, STOP)
    assert (await asking).text == WORDS


async def test_a_scheduler_gone_for_long_fails_the_request() -> None:
    async with housing(scheduler_wait_s=0.2) as house, AsyncClient(house.grpc_address) as client:
        asking = asyncio.ensure_future(client.complete("1,"))
        await first_prompt(house)
        await house.scheduler_server.stop(0)
        with pytest.raises(Unavailable, match="the scheduler cannot be reached"):
            await asking


async def test_a_restarted_scheduler_serves_who_waited() -> None:
    async with housing() as house, AsyncClient(house.grpc_address) as client:
        port = house.scheduler_server.port
        await house.scheduler_server.stop(0)
        await house.until(lambda: not house.gateway.ready)
        asking = asyncio.ensure_future(client.complete("1,"))
        await house.until(lambda: house.gateway.live == 1)
        async with listening([serves(house.scheduler)], f"127.0.0.1:{port}"):
            name = await first_prompt(house)
            house.worker.send(name, 0, IDS, STOP)
            assert (await asking).text == WORDS


async def test_a_client_that_cancels_cancels_down_to_the_scheduler(
    house: House, client: AsyncClient
) -> None:
    stream = client.generate("1,")
    reading = asyncio.ensure_future(stream.complete())
    name = await first_prompt(house)
    house.worker.send(name, 0, IDS[:2])
    await house.until(lambda: house.gateway.metrics.generation_tokens._value.get() == 2)
    stream.cancel()
    await house.until(lambda: bool(house.scheduler.cancels))
    await reading
    expected = sched.CancelRequest(
        request_id=name, reason=common.FINISH_REASON_CANCELLED, output_tokens=2
    )
    assert list(house.scheduler.cancels) == [expected]
    assert house.gateway.live == 0


async def test_a_client_that_vanishes_while_queued_cancels_too(house: House) -> None:
    house.scheduler.place = False
    async with AsyncClient(house.grpc_address) as client:
        reading = asyncio.ensure_future(client.complete("1,", n=3))
        await house.until(lambda: len(house.scheduler.requests) == 3)
        reading.cancel()
        await house.until(lambda: len(house.scheduler.cancels) == 3)
    assert house.gateway.live == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_an_http_client_that_hangs_up_cancels(house: House, stream: bool) -> None:
    host, port = house.http_url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt": "1,", "stream": %s}' % (b"true" if stream else b"false")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    name = await first_prompt(house)
    house.worker.send(name, 0, IDS[:2])
    await house.until(lambda: house.gateway.metrics.generation_tokens._value.get() == 2)
    writer.close()
    await house.until(lambda: bool(house.scheduler.cancels))
    assert house.scheduler.cancels[0].request_id == name
    assert house.gateway.live == 0


async def test_a_stop_string_across_tokens_ends_the_request(
    house: House, client: AsyncClient
) -> None:
    stream = client.generate("1,", stop=["two th", "never"])
    asking = asyncio.ensure_future(stream.complete())
    name = await first_prompt(house)
    for at, token in enumerate(IDS):
        house.worker.send(name, at, [token])
    answer = await asking
    assert (answer.text, answer.finish_reason) == ("one ", FinishReason.STOP)
    await house.until(lambda: bool(house.scheduler.cancels))
    (cancel,) = house.scheduler.cancels
    assert cancel.reason == STOP
    assert cancel.output_tokens == answer.usage.completion_tokens < len(IDS)


@pytest.mark.parametrize(
    ("refusal", "kind", "complaint", "retry_after_s"),
    [
        (sched.REJECT_REASON_QUEUE_FULL, Overloaded, "1000 wait", 7.5),
        (sched.REJECT_REASON_TOO_LONG, InvalidRequest, "max_tokens: 1000 wait", 0.0),
        (sched.REJECT_REASON_DRAINING, Unavailable, "1000 wait", 7.5),
    ],
)
async def test_refusals(
    house: House, client: AsyncClient, refusal: sched.RejectReason.ValueType,
    kind: type[Exception], complaint: str, retry_after_s: float,
) -> None:  # fmt: skip
    rejected = sched.Rejected(reason=refusal, message="1000 wait", retry_after_s=7.5)
    house.scheduler.answers = lambda _: sched.RequestEvent(rejected=rejected)
    with pytest.raises(kind, match=complaint) as caught:
        await client.complete("1,")
    assert isinstance(caught.value, ForetokenError)
    assert caught.value.retry_after_s == retry_after_s


async def test_a_deadline_before_the_first_token_is_an_error(
    house: House, client: AsyncClient
) -> None:
    finished = sched.Finished(reason=common.FINISH_REASON_DEADLINE)
    house.scheduler.answers = lambda _: sched.RequestEvent(finished=finished)
    with pytest.raises(DeadlineExceeded, match="before the first token"):
        await client.complete("1,", timeout_s=30)


async def test_a_deadline_amid_an_answer_keeps_what_there_is(
    house: House, client: AsyncClient
) -> None:
    asking = asyncio.ensure_future(client.complete("1,", timeout_s=30))
    name = await first_prompt(house)
    house.worker.send(name, 0, IDS[:1])
    await house.until(lambda: house.gateway.metrics.generation_tokens._value.get() == 1)
    house.scheduler.tell(name, finished=sched.Finished(reason=common.FINISH_REASON_DEADLINE))
    answer = await asking
    assert (answer.text, answer.finish_reason) == ("on", FinishReason.DEADLINE)


async def test_a_deadline_is_kept_though_nobody_says_so(house: House, client: AsyncClient) -> None:
    house.scheduler.place = False
    with pytest.raises(DeadlineExceeded):
        await client.complete("1,", timeout_s=0.2)
    await house.until(lambda: bool(house.scheduler.cancels))


async def test_a_plain_grpc_deadline_reaches_the_scheduler(house: House) -> None:
    house.scheduler.place = False
    async with connect(house.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        call = stub.Generate(gateway_pb2.GenerateRequest(prompt="1,"), timeout=20)
        await house.until(lambda: bool(house.scheduler.requests))
        call.cancel()
    # gRPC rounds a timeout up on the wire, by about a hundredth at most.
    assert 10 < house.scheduler.requests[0].deadline_in_s < 20 * 1.02


async def test_a_workers_failure_is_told(house: House, client: AsyncClient) -> None:
    asking = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(house)
    house.worker.send(name, 0, (), common.FINISH_REASON_ERROR, "out of luck")
    with pytest.raises(ServerError, match="out of luck"):
        await asking


async def test_the_schedulers_end_waits_for_the_tokens(house: House, client: AsyncClient) -> None:
    asking = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(house)
    ended = sched.Finished(reason=LENGTH, output_tokens=len(IDS))
    house.scheduler.tell(name, finished=ended)
    house.worker.send(name, 0, IDS, LENGTH)
    answer = await asking
    assert (answer.text, answer.finish_reason) == (WORDS, FinishReason.LENGTH)


async def test_an_end_whose_tokens_never_come_is_asked_for_again() -> None:
    async with housing(finish_wait_s=0.1) as house, AsyncClient(house.grpc_address) as client:
        asking = asyncio.ensure_future(client.complete("1,"))
        name = await first_prompt(house)
        house.worker.send(name, 0, IDS[:2])
        house.scheduler.tell(name, finished=sched.Finished(reason=STOP, output_tokens=len(IDS)))
        await house.until(lambda: len(house.worker.prompts) == 2)
        house.worker.send(house.worker.prompts[1].request_id, 2, IDS[2:], STOP)
        assert (await asking).text == WORDS


async def test_attempts_are_bounded() -> None:
    async with housing(max_attempts=3) as house, AsyncClient(house.grpc_address) as client:
        asking = asyncio.ensure_future(client.complete("1,"))
        for attempt in range(1, 4):
            await house.until(lambda attempt=attempt: len(house.worker.prompts) == attempt)  # type: ignore[misc]
            house.worker.send(house.worker.prompts[-1].request_id, 5, IDS)
        with pytest.raises(Unavailable, match="gave up after 3 attempts"):
            await asking


async def test_live_choices_are_bounded() -> None:
    async with housing(max_sessions=3) as house, AsyncClient(house.grpc_address) as client:
        asking = asyncio.ensure_future(client.complete("1,", n=2))
        await house.until(lambda: len(house.worker.prompts) == 2)
        with pytest.raises(Overloaded, match="all 3 places are taken") as caught:
            await client.complete("1,", n=2)
        assert caught.value.retry_after_s == 3.0
        reply = await house.http("POST", "/v1/completions", {"prompt": "1,", "n": 2})
        assert (reply.status, reply.headers["retry-after"]) == (429, "3")
        for prompt in list(house.worker.prompts):
            house.worker.send(prompt.request_id, 0, IDS, STOP)
        assert [choice.text for choice in (await asking).choices] == [WORDS, WORDS]


async def test_a_writer_that_does_not_come_back_is_let_go() -> None:
    async with housing(client_stall_s=0.2) as house:
        call = house.gateway.open([house.gateway.parse(REQUEST)])
        chunks = call.chunks()

        async def write() -> None:
            await anext(chunks)
            await asyncio.Event().wait()  # a socket that takes nothing more

        writer = asyncio.ensure_future(write())
        name = await first_prompt(house)
        house.worker.send(name, 0, IDS[:2])
        await house.until(lambda: call.owner is not None and call.taken_s > 0)
        house.worker.send(name, 2, IDS[2:4])
        await house.until(lambda: bool(house.scheduler.cancels))
        with pytest.raises(asyncio.CancelledError):
            await writer
        assert house.gateway.live == 0


async def test_a_scheduler_in_the_same_process_is_as_good() -> None:
    async with housing(in_process=True) as house, AsyncClient(house.grpc_address) as client:
        asking = asyncio.ensure_future(client.complete("1,"))
        name = await first_prompt(house)
        house.worker.send(name, 0, IDS, STOP)
        assert (await asking).text == WORDS
        stream = client.generate("1,")
        reading = asyncio.ensure_future(stream.complete())
        await house.until(lambda: len(house.worker.prompts) == 2)
        house.scheduler.break_stream()
        await house.until(lambda: len(house.worker.prompts) == 3)
        stream.cancel()
        await house.until(lambda: bool(house.scheduler.cancels))
        await reading


async def test_draining_refuses_new_requests_and_waits_for_old_ones(
    house: House, client: AsyncClient
) -> None:
    asking = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(house)
    draining = asyncio.ensure_future(house.gateway.drain())
    await house.until(lambda: house.gateway.draining)
    with pytest.raises(Unavailable, match="shutting down"):
        await client.complete("1,")
    reply = await house.http("POST", "/v1/completions", {"prompt": "1,"})
    assert reply.status == 503
    assert (await house.http("GET", "/health")).status == 503
    assert not draining.done()
    house.worker.send(name, 0, IDS, STOP)
    assert (await asking).text == WORDS
    await draining


async def test_an_unplaced_requests_default_length_is_what_fits(
    house: House, client: AsyncClient
) -> None:
    asking = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(house)
    assert house.scheduler.requests[0].max_tokens == 512 - 2
    house.worker.send(name, 0, IDS, STOP)
    await asking


async def test_bytes_that_are_no_request_are_the_clients_mistake(house: House) -> None:
    async with connect(house.grpc_address) as channel:
        call: Any = channel.unary_stream("/foretoken.v1.Gateway/Generate")
        for raw in (b"\x12\x02\xff\xfe", b"\xff"):
            with pytest.raises(aio.AioRpcError) as caught:
                async for _ in call(raw):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not house.scheduler.requests

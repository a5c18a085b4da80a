"""Requests of a key with limits beside those of one without, over HTTP and gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc import aio

from gateway.admission.key_limits import RATE_HEADERS, Grant
from gateway.types.api_keys import name_keys
from gateway.types.key_limits import KeyLimits
from protos.generated import common_pb2, gateway_pb2, gateway_pb2_grpc
from protos.generated import scheduler_pb2 as sched
from services.runtime.network.channel import connect
from tests.gateway.gateway_fakes import Harness, Reply, run_harness, tokens_of

LIMITED, FREE = "sk-limited-0123456789", "sk-free-0123456789"
NAME = name_keys([LIMITED])[0].name
BODY = {"prompt": "1,", "max_tokens": 3}


def limits(**counts: int) -> dict[str, Any]:
    keyed = {NAME: KeyLimits(**counts, sla_classes=("standard", "batch"))}
    return {"api_keys": (LIMITED, FREE), "key_limits": keyed}


async def complete(harness: Harness, key: str, **more: object) -> Reply:
    headers = {"authorization": f"Bearer {key}"}
    return await harness.http("POST", "/v1/completions", BODY | more, headers)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = run_harness(
        lambda _: tokens_of("123"), **limits(requests_per_minute=3, tokens_per_minute=400)
    )
    async with made as running:
        yield running


async def test_requests_beyond_the_limit_are_refused_until_it_refills(harness: Harness) -> None:
    for left in (2, 1, 0):
        reply = await complete(harness, LIMITED, stream=left == 1)
        assert (reply.status, reply.headers["x-ratelimit-remaining-requests"]) == (200, str(left))
    refused = await complete(harness, LIMITED)
    assert refused.status == 429
    error = refused.json["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert error["message"] == (
        f"API key {NAME} has used its limit of 3 requests a minute; retry later"
    )
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-limit-requests"] == "3"
    assert refused.headers["x-ratelimit-limit-tokens"] == "400"
    free = await complete(harness, FREE)
    assert free.status == 200
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]
    channel = connect(harness.grpc_address)
    stub = gateway_pb2_grpc.GatewayStub(channel)
    call = stub.Generate(
        gateway_pb2.GenerateRequest(prompt="1,"),
        metadata=(("authorization", f"Bearer {LIMITED}"),),
    )
    with pytest.raises(aio.AioRpcError) as caught:
        [each async for each in call]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"API key {NAME}" in (caught.value.details() or "")
    trailers = dict(await call.trailing_metadata())
    assert float(trailers["retry-after-s"]) >= 1
    assert 1 <= int(trailers["retry-after"]) <= 20
    assert trailers["x-ratelimit-limit-requests"] == "3"
    assert trailers["x-ratelimit-remaining-requests"] == "0"
    await channel.close()
    metrics = (await harness.http("GET", "/metrics")).text
    refusals = [line for line in metrics.splitlines() if 'reason="key_requests"' in line]
    assert refusals[0].endswith(" 2.0")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that each ended request has used."""
    used_tokens: list[int] = []
    settle = Grant.settle

    def recording(self: Grant, used: int, now_s: float) -> None:
        used_tokens.append(used)
        settle(self, used, now_s)

    monkeypatch.setattr(Grant, "settle", recording)
    return used_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_settled_by_what_an_answer_has(
    harness: Harness, settled: list[int], stream: bool
) -> None:
    told = {"stream_options": {"include_usage": True}} if stream else {}
    reply = await complete(harness, LIMITED, max_tokens=350, n=1, stream=stream, **told)
    assert reply.status == 200
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) <= 50
    usage = (reply.events[-1] if stream else reply.json)["usage"]
    await harness.until(lambda: not harness.gateway.live)
    assert settled == [usage["total_tokens"]]
    assert (await complete(harness, LIMITED, max_tokens=350)).status == 200


async def test_a_request_of_several_choices_is_settled_once(
    harness: Harness, settled: list[int]
) -> None:
    reply = await complete(harness, LIMITED, n=3, prompt=["1,", "2,"])
    usage = reply.json["usage"]
    await harness.until(lambda: not harness.gateway.live)
    assert settled == [usage["total_tokens"]]
    assert reply.headers["x-ratelimit-remaining-requests"] == "2"


async def test_a_class_that_the_key_may_not_use_is_a_400(harness: Harness) -> None:
    headers = {"authorization": f"Bearer {LIMITED}", "x-foretoken-sla": "interactive"}
    refused = await harness.http("POST", "/v1/completions", BODY, headers)
    assert refused.status == 400
    assert refused.json["error"]["message"] == (
        f"sla_class: API key {NAME} may not use 'interactive'; name one that it may use: "
        "standard, batch"
    )
    assert not harness.scheduler.requests
    assert (await complete(harness, LIMITED)).headers["x-ratelimit-remaining-requests"] == "2"


async def test_a_cancelled_request_gives_back_its_tokens_and_its_place(settled: list[int]) -> None:
    async with run_harness(**limits(concurrent_requests=1, tokens_per_minute=400)) as harness:
        channel = connect(harness.grpc_address)
        stub = gateway_pb2_grpc.GatewayStub(channel)
        request = gateway_pb2.GenerateRequest(prompt="1,")
        call = stub.Generate(request, metadata=(("authorization", f"Bearer {LIMITED}"),))
        reading = asyncio.ensure_future(call.read())
        await harness.until(lambda: bool(harness.worker.prompts))
        refused = await complete(harness, LIMITED)
        assert refused.status == 429
        assert "runs its limit of 1 requests at a time" in refused.text
        call.cancel()
        with suppress(asyncio.CancelledError, aio.AioRpcError):
            await reading
        await harness.until(lambda: not harness.gateway.live)
        assert settled == [harness.scheduler.requests[0].prompt_tokens]
        await channel.close()


async def test_an_answer_over_grpc_has_the_limits_as_trailers(harness: Harness) -> None:
    channel = connect(harness.grpc_address)
    stub = gateway_pb2_grpc.GatewayStub(channel)
    for key, names in ((LIMITED, set(RATE_HEADERS)), (FREE, set())):
        request = gateway_pb2.GenerateRequest(prompt="1,")
        call = stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),))
        assert [each async for each in call]
        trailers = dict(await call.trailing_metadata())
        assert {name for name in trailers if name.startswith("x-ratelimit")} == names
        assert trailers.get("x-ratelimit-remaining-requests", "2") == "2"
    await channel.close()


async def test_tokens_in_the_queue_are_bounded_until_a_worker_has_the_request() -> None:
    async with run_harness(
        lambda _: tokens_of("123"), place=False, queue=(1, 30.0), **limits(queued_tokens=100)
    ) as harness:
        scheduler = harness.scheduler
        first = asyncio.ensure_future(complete(harness, LIMITED, max_tokens=60))
        await harness.until(lambda: bool(scheduler.requests))
        refused = await complete(harness, LIMITED, max_tokens=60)
        assert refused.status == 429
        assert refused.json["error"]["message"] == (
            f"API key {NAME} would have more than its limit of 100 queued tokens; retry later"
        )
        assert 20 <= int(refused.headers["retry-after"]) <= 30  # until the queue is empty
        assert len(scheduler.requests) == 1
        scheduler.send_placed(scheduler.requests[0].request_id)
        await harness.until(lambda: bool(harness.worker.prompts))
        scheduler.place = True
        assert (await complete(harness, LIMITED, max_tokens=60)).status == 200
        assert (await first).status == 200


async def test_a_forecast_makes_room_for_the_next_request(settled: list[int]) -> None:
    async with run_harness(place=False, **limits(tokens_per_minute=400)) as harness:
        scheduler, worker = harness.scheduler, harness.worker
        first = asyncio.ensure_future(complete(harness, LIMITED, max_tokens=300))
        await harness.until(lambda: bool(scheduler.requests))
        name = scheduler.requests[0].request_id
        assert scheduler.requests[0].length_quantile == 0.95
        refused = await complete(harness, LIMITED, max_tokens=300)
        assert refused.status == 429
        assert "a minute, and this request may need 30" in refused.json["error"]["message"]
        scheduler.send_event(name, length_bound=sched.LengthBound(output_tokens=20))
        scheduler.send_placed(name)
        await harness.until(lambda: bool(worker.prompts))
        second = asyncio.ensure_future(complete(harness, LIMITED, max_tokens=300))
        await harness.until(lambda: len(scheduler.requests) == 2)
        # A longer forecast takes what is left, and more than that; both requests go on.
        scheduler.send_event(name, length_bound=sched.LengthBound(output_tokens=290))
        scheduler.send_placed(scheduler.requests[1].request_id)
        await harness.until(lambda: len(worker.prompts) == 2)
        refused = await complete(harness, LIMITED, max_tokens=1)
        assert "has 0 tokens left of its limit of 400 a minute" in refused.json["error"]["message"]
        for prompt in worker.prompts:
            worker.send(prompt.request_id, 0, tokens_of("123"), common_pb2.FINISH_REASON_STOP)
        assert [(await each).status for each in (first, second)] == [200, 200]
        await harness.until(lambda: len(settled) == 2)
        scheduler.place, worker.script = True, lambda _: tokens_of("123")
        assert (await complete(harness, LIMITED, max_tokens=300)).status == 200
        assert (await complete(harness, FREE)).status == 200
        assert not scheduler.requests[-1].length_quantile


async def test_requests_of_a_key_with_a_weight_are_those_of_one_tenant() -> None:
    limited: dict[str, Any] = {"api_keys": (LIMITED, FREE)}
    limited["key_limits"] = {NAME: KeyLimits(weight=2)}
    async with run_harness(lambda _: tokens_of("123"), **limited) as harness:
        for key in (LIMITED, FREE):
            await complete(harness, key, user=NAME)
        weighted, plain = harness.scheduler.requests
        assert (weighted.tenant, weighted.weight) == (NAME, 2)
        assert (plain.tenant, plain.weight) == (NAME, 0)

"""A request's span, its child spans, and the gen_ai metrics."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from foretoken import AsyncClient
from gateway.faces.grpc.decode import decode_request
from protos.generated import common_pb2 as common
from protos.generated import gateway_pb2
from protos.generated import scheduler_pb2 as sched
from tests.gateway.gateway_fakes import Harness, demo_text, run_harness, tokens_of
from tests.gateway.gateway_fixtures import IDS, first_prompt
from tests.observability.tracing.otlp import Written, WrittenSpans

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY: dict[str, Any] = {"model": "demo", "prompt": "Copy: abc\n", "max_tokens": 3}
DURATION = "gen_ai.server.request.duration"


@pytest.fixture
def written() -> WrittenSpans:
    return WrittenSpans()


@pytest.fixture
async def silent(written: WrittenSpans) -> AsyncIterator[Harness]:
    """A gateway with a worker without a script."""
    async with run_harness(spans=written) as harness:
        yield harness


async def over(harness: Harness, written: WrittenSpans) -> Written:
    """The request's span, once it has ended."""
    await harness.until(lambda: bool(written.all) and written.all[0].end_s is not None)
    return written.all[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_span_and_metrics_of_an_answer(stream: bool, written: WrittenSpans) -> None:
    async with run_harness(lambda _: tokens_of("abc"), spans=written) as harness:
        headers = {"traceparent": CLIENT}
        reply = await harness.http("POST", "/v1/completions", {**BODY, "stream": stream}, headers)
        request = await over(harness, written)
        reported = harness.scheduler.requests[0].traceparent, harness.worker.prompts[0].traceparent
    assert reply.status == 200
    assert (request.name, request.parent) == ("text_completion demo", CLIENT)
    assert [span.name for span in written.all] == ["text_completion demo", "tokenize", "stream"]
    assert {span.parent for span in written.all[1:]} == {request.traceparent}
    assert reported == (request.traceparent, request.traceparent)
    assert request.attributes["gen_ai.usage.input_tokens"] == len(demo_text().encode("Copy: abc\n"))
    assert request.attributes["gen_ai.usage.output_tokens"] == 3
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert request.attributes["foretoken.sla.outcome"] == "met"
    assert "error.type" not in request.attributes
    assert [name for name, *_ in written.measured] == [
        DURATION, "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token",
    ]  # fmt: skip
    assert all(seconds >= 0 for _, seconds, _ in written.measured)


REFUSALS: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({**BODY, "model": "x" * 5_000}, {}, "NOT_FOUND"),
    ({**BODY, "max_tokens": -1}, {}, "INVALID_ARGUMENT"),
    ({**BODY, "max_tokens": 100_000}, {}, "INVALID_ARGUMENT"),
    (BODY, {"x-request-timeout-s": "soon"}, "INVALID_ARGUMENT"),
    ({**BODY, "stream": True}, {"x-foretoken-sla": "no-such-class"}, "INVALID_ARGUMENT"),
]


@pytest.mark.parametrize(("body", "headers", "kind"), REFUSALS)
async def test_refused_request_s_span_has_the_reason_and_no_client_text(
    body: dict[str, Any], headers: dict[str, str], kind: str,
    silent: Harness, written: WrittenSpans,
) -> None:  # fmt: skip
    reply = await silent.http("POST", "/v1/completions", body, headers)
    assert reply.status in (400, 404)
    request = await over(silent, written)
    assert request.attributes["error.type"] == kind
    assert request.attributes["failed"] == reply.json["error"]["message"]
    [(name, _, labels)] = written.measured
    assert (name, labels) == (
        DURATION,
        {
            "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "foretoken",
            "gen_ai.request.model": "demo", "gen_ai.response.model": "demo", "error.type": kind,
        },
    )  # fmt: skip


async def test_scheduler_rejection_is_the_span_s_error(
    silent: Harness, written: WrittenSpans
) -> None:
    refused = sched.Rejected(reason=sched.REJECT_REASON_QUEUE_FULL, message="full")
    silent.scheduler.answers = lambda _: sched.RequestEvent(rejected=refused)
    reply = await silent.http("POST", "/v1/completions", {**BODY, "stream": True})
    assert reply.status == 429
    request = await over(silent, written)
    assert request.attributes["error.type"] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("stream", [False, True])
async def test_span_of_a_missed_deadline_has_an_error(stream: bool, written: WrittenSpans) -> None:
    async with run_harness(place=False, spans=written) as harness:
        headers = {"x-request-timeout-s": "1"}
        reply = await harness.http("POST", "/v1/completions", {**BODY, "stream": stream}, headers)
        request = await over(harness, written)
    assert reply.status == 504
    assert request.attributes["error.type"] == "DEADLINE_EXCEEDED"


async def test_span_of_a_broken_stream_has_the_failure(
    silent: Harness, written: WrittenSpans
) -> None:
    pending = asyncio.ensure_future(
        silent.http("POST", "/v1/completions", {**BODY, "stream": True})
    )
    name = await first_prompt(silent)
    silent.worker.send(name, 0, IDS[:1])
    await silent.until(lambda: silent.gateway.metrics.generation_tokens._value.get() == 1)
    silent.worker.send(name, 1, [], common.FINISH_REASON_ERROR, "the device is gone")
    reply = await pending
    assert reply.status == 200 and "the device is gone" in reply.text
    request = await over(silent, written)
    assert request.attributes["error.type"] == "INTERNAL"
    assert request.attributes["failed"] == "the device is gone"


async def test_span_of_a_disconnected_client_is_cancelled(
    silent: Harness, written: WrittenSpans
) -> None:
    async with AsyncClient(silent.grpc_address) as client:
        stream = client.generate("1,", max_tokens=9)
        reading = asyncio.ensure_future(stream.complete())
        name = await first_prompt(silent)
        silent.worker.send(name, 0, IDS[:2])
        await silent.until(lambda: silent.gateway.metrics.generation_tokens._value.get() == 2)
        stream.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        request = await over(silent, written)
    assert request.attributes["error.type"] == "cancelled"
    assert request.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert "failed" not in request.attributes


@pytest.mark.parametrize(
    ("delivered", "ttft_s", "cause"), [(True, 0.1, "prefill"), (False, 60.0, "client")]
)
async def test_span_agrees_with_metrics_on_delivered_tokens(
    delivered: bool, ttft_s: float, cause: str, silent: Harness, written: WrittenSpans
) -> None:
    """The worker is fast. A late reader misses the SLA; a client that reads nothing counts as
    disconnected."""
    gateway = silent.gateway
    trace = silent.front.tracer.begin("chat", {}, {})
    request = gateway_pb2.GenerateRequest(prompt="1,", sla=common.Sla(ttft_s=ttft_s))
    call = await gateway.open(
        [await gateway.intake.parse(decode_request(request), gateway.intake.admit(), trace)],
        trace=trace,
    )
    silent.worker.send(await first_prompt(silent), 0, IDS, common.FINISH_REASON_STOP)
    await silent.until(lambda: call.choices[0].session.over)
    await asyncio.sleep(0.1)
    if delivered:
        assert len([chunk async for chunk in call.chunks()]) == 1
    call.close()
    trace.end()
    reported = written.all[0].attributes
    [recorded] = [
        sample.labels
        for family in gateway.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "foretoken_sla_requests_total" and sample.value
    ]
    assert reported["foretoken.sla.outcome"] == recorded["outcome"] == "missed"
    assert reported["foretoken.sla.cause"] == recorded["cause"] == cause
    assert reported["gen_ai.usage.output_tokens"] == (len(IDS) if delivered else 0)
    assert reported["gen_ai.response.finish_reasons"] == ["stop" if delivered else "cancelled"]
    assert reported.get("error.type") == (None if delivered else "cancelled")
    name, custom = "foretoken_time_to_first_token_seconds_sum", {"class": "custom"}
    first_s = [s for what, s, _ in written.measured if what == "gen_ai.server.time_to_first_token"]
    assert first_s == (
        [gateway.metrics.registry.get_sample_value(name, custom)] if delivered else []
    )

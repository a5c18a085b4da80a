"""The official `openai` client against a gateway on a real socket, and requests it never sends."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import openai
import pytest

from protos.generated import common_pb2 as common
from protos.generated import scheduler_pb2 as sched
from protos.generated.worker_pb2 import Prompt
from tests.gateway.faces.http.openai_checks import CHECKS, Check, ask, complete, connected
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of


def answer(prompt: Prompt) -> Sequence[int]:
    """One answer per prompt; with sampling, one per prompt and seed."""
    text = f" of {sum(prompt.token_ids[: prompt.prompt_tokens])}: sort the 😀 words é 漢字, please"
    seed = prompt.sampling.seed if prompt.sampling.temperature else 0
    return tokens_of(f"answer {seed}{text}")


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(answer) as made:
        forecast = common.Forecast(points=[5, 10, 400])
        made.scheduler.forecast = sched.ForecastUpdate(
            forecast=forecast, token_s=0.001, ttft_s=0.01
        )
        yield made


@pytest.fixture
def openai_base_url(harness: Harness) -> str:
    return harness.http_url


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_gateway_serves_the_openai_client(check: Check, openai_base_url: str) -> None:
    await check(openai_base_url)


async def test_cache_salt_reaches_the_worker(harness: Harness) -> None:
    longest = "s" * 256
    async with connected(harness.http_url) as client:
        await ask(client, extra_body={"cache_salt": longest})
        await ask(client, extra_body={"cache_salt": None})
        await complete(client, prompt=["1,", "2,"], extra_body={"cache_salt": "sel 盐"})
        for endpoint in (ask, complete):
            with pytest.raises(openai.BadRequestError) as caught:
                await endpoint(client, extra_body={"cache_salt": longest + "s"})
            assert caught.value.param == "cache_salt"
    assert [p.cache_salt for p in harness.worker.prompts] == [longest, "", "sel 盐", "sel 盐"]


async def test_health_follows_the_fleet() -> None:
    async with run_harness(answer, with_worker=False) as harness:
        reply = await harness.http("GET", "/health")
        why = "no worker is attached"
        assert (reply.status, reply.json) == (503, {"status": why, "models": {"demo": why}})
        worker = f"127.0.0.1:{harness.worker_server.port}"
        harness.scheduler.streams[-1].put_nowait(harness.scheduler.fleet([worker]))
        await harness.until(lambda: harness.gateway.ready)
        assert (await harness.http("GET", "/health")).status == 200
        harness.scheduler.streams[-1].put_nowait(harness.scheduler.fleet([]))
        await harness.until(lambda: not harness.gateway.ready)
        assert (await harness.http("GET", "/health")).status == 503


async def test_metrics_count_served_requests(harness: Harness) -> None:
    headers = {"x-foretoken-sla": "batch"}
    body = {"prompt": "1,", "max_tokens": 5}
    reply = await harness.http("POST", "/v1/completions", body, headers)
    assert reply.json["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    text = (await harness.http("GET", "/metrics")).text
    of_class = '{model_name="demo",class="batch"}'
    for line in (
        'foretoken_request_success_total{model_name="demo",finished_reason="length"} 1.0',
        'foretoken_sla_requests_total{model_name="demo",class="batch",outcome="met",cause=""} 1.0',
        'foretoken_goodput_tokens_total{model_name="demo",class="batch"} 5.0',
        'foretoken_prompt_tokens_total{model_name="demo"} 2.0',
        'foretoken_generation_tokens_total{model_name="demo"} 5.0',
        'foretoken_time_to_first_token_seconds_count{model_name="demo",class="batch"} 1.0',
        f"foretoken_request_time_per_output_token_seconds_count{of_class} 1.0",
        f"foretoken_request_max_time_per_output_token_seconds_count{of_class} 1.0",
        'foretoken_inter_token_latency_seconds_count{model_name="demo"} 4.0',
        'foretoken_inter_token_latency_seconds_bucket{model_name="demo",le="+Inf"} 4.0',
        'foretoken_e2e_request_latency_seconds_count{model_name="demo",class="batch"} 1.0',
        'foretoken_num_requests_running{model_name="demo"} 0.0',
        'foretoken_num_requests_waiting{model_name="demo"} 0.0',
    ):
        assert line in text.splitlines(), line


async def test_full_queue_is_429_with_retry_after(harness: Harness) -> None:
    rejected = sched.Rejected(
        reason=sched.REJECT_REASON_QUEUE_FULL, message="1000 requests wait", retry_after_s=2.2
    )
    harness.scheduler.answers = lambda _: sched.RequestEvent(rejected=rejected)
    for stream in (False, True):
        reply = await harness.http("POST", "/v1/completions", {"prompt": "1,", "stream": stream})
        assert (reply.status, reply.headers["retry-after"]) == (429, "3")
        assert reply.json["error"] == {
            "message": "1000 requests wait", "type": "rate_limit_error",
            "param": None, "code": "queue_full",
        }  # fmt: skip
    text = (await harness.http("GET", "/metrics")).text
    missed = 'model_name="demo",class="standard",outcome="missed",cause="rejected"'
    assert f"foretoken_sla_requests_total{{{missed}}} 2.0" in text


@pytest.mark.parametrize(
    ("reason", "status", "code", "param", "retry_after"),
    [
        (sched.REJECT_REASON_TOO_LATE, 429, "queue_full", None, "3"),
        (sched.REJECT_REASON_NO_MODEL, 404, "model_not_found", "model", None),
    ],
)
async def test_scheduler_rejection_becomes_an_http_status(
    harness: Harness, reason: sched.RejectReason.ValueType, status: int, code: str,
    param: str | None, retry_after: str | None,
) -> None:  # fmt: skip
    rejected = sched.Rejected(reason=reason, message="the reason", retry_after_s=2.2)
    harness.scheduler.answers = lambda _: sched.RequestEvent(rejected=rejected)
    reply = await harness.http("POST", "/v1/completions", {"prompt": "1,"})
    error = reply.json["error"]
    assert (reply.status, error["code"], error["param"]) == (status, code, param)
    assert (error["message"], reply.headers.get("retry-after")) == ("the reason", retry_after)


async def test_unreachable_deadline_is_504_before_it_passes(harness: Harness) -> None:
    finished = sched.Finished(reason=common.FINISH_REASON_DEADLINE)
    harness.scheduler.answers = lambda _: sched.RequestEvent(finished=finished)
    headers = {"x-request-timeout-s": "3000"}
    for stream in (False, True):
        body = {"prompt": "1,", "stream": stream}
        reply = await harness.http("POST", "/v1/completions", body, headers)
        assert (reply.status, reply.json["error"]["code"]) == (504, "deadline_exceeded")


async def test_deadline_in_the_queue_is_504() -> None:
    async with run_harness(answer, place=False) as harness:
        headers = {"x-request-timeout-s": "1"}
        for stream in (False, True):
            body = {"prompt": "1,", "stream": stream}
            reply = await harness.http("POST", "/v1/completions", body, headers)
            assert (reply.status, reply.json["error"]["type"]) == (504, "timeout_error")
        assert 0 < harness.scheduler.requests[0].deadline_in_s <= 1


async def test_deadline_within_an_answer_is_its_finish_reason() -> None:
    async with run_harness() as harness:
        headers = {"x-request-timeout-s": "2"}
        body = {"prompt": "1,", "stream": True, "max_tokens": 400}
        pending = asyncio.ensure_future(harness.http("POST", "/v1/completions", body, headers))
        await harness.until(lambda: bool(harness.worker.prompts))
        harness.worker.send(harness.worker.prompts[0].request_id, 0, tokens_of("12"))
        events = (await pending).events
        assert events[-1]["choices"][0]["finish_reason"] == "deadline"
        assert "".join(event["choices"][0]["text"] for event in events) == "12"


async def test_failure_within_a_stream_is_an_error_event() -> None:
    async with run_harness() as harness:
        pending = asyncio.ensure_future(
            harness.http("POST", "/v1/completions", {"prompt": "1,", "stream": True})
        )
        await harness.until(lambda: bool(harness.worker.prompts))
        name = harness.worker.prompts[0].request_id
        harness.worker.send(name, 0, tokens_of("12"))
        await asyncio.sleep(0.2)
        harness.worker.send(name, 2, (), common.FINISH_REASON_ERROR, "out of luck")
        reply = await pending
        assert reply.status == 200
        last = [line for line in reply.text.splitlines() if line][-1]
        assert last.startswith('data: {"error": {"message": "out of luck", "type": "server_error"')

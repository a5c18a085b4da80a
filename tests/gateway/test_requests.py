"""The request path over real sockets: messages to scheduler and worker, and tokens as an answer."""

import asyncio

from foretoken import AsyncClient
from protos.generated import common_pb2 as common
from protos.generated import scheduler_pb2 as sched
from services.core import FinishReason
from tests.gateway.gateway_fakes import Harness, run_harness
from tests.gateway.gateway_fixtures import IDS, LENGTH, STOP, WORDS, first_prompt
from tests.gateway.gateway_fixtures import client as client
from tests.gateway.gateway_fixtures import harness as harness


async def test_scheduler_and_worker_receive_the_request(
    harness: Harness, client: AsyncClient
) -> None:
    pending = asyncio.ensure_future(
        client.complete(
            messages=[{"role": "system", "content": "be kind"}, {"role": "user", "content": "1,"}],
            max_tokens=20, seed=5, temperature=0.5, stop="END", application="count",
            sla={"ttft_s": 0.5}, timeout_s=60,
        )
    )  # fmt: skip
    name = await first_prompt(harness)
    harness.worker.send(name, 0, IDS, STOP)
    assert (await pending).text == WORDS
    (request,) = harness.scheduler.requests
    assert request.request_id == name
    assert (request.model, request.application) == ("demo", "count")
    assert (request.prompt_tokens, request.max_tokens, request.delivered_tokens) == (10, 20, 0)
    assert request.sla == common.Sla(name="custom", ttft_s=0.5)
    assert 0 <= request.age_s < 5
    assert 50 < request.deadline_in_s <= 60
    assert request.text == common.PromptText(instruction="be kind", user_input="1,")
    (prompt,) = harness.worker.prompts
    assert len(prompt.token_ids) == prompt.prompt_tokens == 10
    assert prompt.sampling.seed == 5
    assert prompt.sampling.temperature == 0.5
    assert not prompt.sampling.stop
    assert harness.scheduler.hellos and harness.worker.opened == 1
    assert not harness.scheduler.cancels


async def test_missing_seed_is_drawn(harness: Harness, client: AsyncClient) -> None:
    pending = [asyncio.ensure_future(client.complete("1,", n=2)) for _ in range(2)]
    await harness.until(lambda: len(harness.worker.prompts) == 4)
    for prompt in harness.worker.prompts:
        harness.worker.send(prompt.request_id, 0, IDS, STOP)
    await asyncio.gather(*pending)
    seeds: dict[str, list[int]] = {}
    for prompt in sorted(harness.worker.prompts, key=lambda p: p.request_id):
        seeds.setdefault(prompt.request_id[:32], []).append(prompt.sampling.seed)
    (a, next_a), (b, next_b) = seeds.values()
    assert (next_a, next_b) == (a + 1, b + 1)
    assert a != b


async def test_repeated_tokens_are_delivered_once(harness: Harness, client: AsyncClient) -> None:
    pending = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(harness)
    harness.worker.send(name, 0, IDS[:3])
    harness.worker.send(name, 0, IDS[:5])
    harness.worker.send(name, 4, IDS[4:], STOP)
    answer = await pending
    assert (answer.text, answer.choices[0].token_ids) == (WORDS, IDS)


async def test_stop_string_across_tokens_ends_the_request(
    harness: Harness, client: AsyncClient
) -> None:
    stream = client.generate("1,", stop=["two th", "never"])
    pending = asyncio.ensure_future(stream.complete())
    name = await first_prompt(harness)
    for at, token in enumerate(IDS):
        harness.worker.send(name, at, [token])
    answer = await pending
    assert (answer.text, answer.finish_reason) == ("one ", FinishReason.STOP)
    await harness.until(lambda: bool(harness.scheduler.cancels))
    (cancel,) = harness.scheduler.cancels
    assert cancel.reason == STOP
    assert cancel.output_tokens == answer.usage.completion_tokens < len(IDS)


async def test_reported_end_waits_for_the_tokens(harness: Harness, client: AsyncClient) -> None:
    pending = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(harness)
    ended = sched.Finished(reason=LENGTH, output_tokens=len(IDS))
    harness.scheduler.send_event(name, finished=ended)
    harness.worker.send(name, 0, IDS, LENGTH)
    answer = await pending
    assert (answer.text, answer.finish_reason) == (WORDS, FinishReason.LENGTH)


async def test_scheduler_in_the_same_process() -> None:
    async with run_harness(in_process=True) as harness, AsyncClient(harness.grpc_address) as client:
        pending = asyncio.ensure_future(client.complete("1,"))
        name = await first_prompt(harness)
        harness.worker.send(name, 0, IDS, STOP)
        assert (await pending).text == WORDS
        stream = client.generate("1,")
        reading = asyncio.ensure_future(stream.complete())
        await harness.until(lambda: len(harness.worker.prompts) == 2)
        harness.scheduler.break_stream()
        await harness.until(lambda: len(harness.scheduler.requests) == 3)
        stream.cancel()
        await harness.until(lambda: bool(harness.scheduler.cancels))
        await reading


async def test_default_max_tokens_is_what_fits_the_context(
    harness: Harness, client: AsyncClient
) -> None:
    pending = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(harness)
    assert harness.scheduler.requests[0].max_tokens == 512 - 2
    harness.worker.send(name, 0, IDS, STOP)
    await pending

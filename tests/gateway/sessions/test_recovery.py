"""Requests after an eviction, a swap, or the loss of tokens, the worker or the scheduler."""

import asyncio
from typing import Any

import pytest

from foretoken import Answer, AsyncClient, Unavailable
from protos.generated import scheduler_pb2 as sched
from services.core import FinishReason
from services.runtime.server import listening
from tests.gateway.gateway_fakes import (
    Harness,
    run_harness,
    scheduler_mount,
    tokens_of,
    worker_mount,
)
from tests.gateway.gateway_fixtures import IDS, STOP, WORDS, first_prompt
from tests.gateway.gateway_fixtures import client as client
from tests.gateway.gateway_fixtures import harness as harness


async def begin_answer(
    harness: Harness, client: AsyncClient, tokens: int, **options: Any
) -> tuple[asyncio.Future[Answer], str]:
    """Returns an answer that has received its first `tokens`, and its request id."""
    pending = asyncio.ensure_future(client.complete("1,", **options))
    name = await first_prompt(harness)
    harness.worker.send(name, 0, IDS[:tokens])
    await harness.until(lambda: harness.gateway.metrics.generation_tokens._value.get() == tokens)
    return pending, name


async def test_evicted_request_continues_where_it_was(
    harness: Harness, client: AsyncClient
) -> None:
    pending, name = await begin_answer(harness, client, 3)
    harness.scheduler.send_event(name, preempted=sched.Preempted(output_tokens=3))
    harness.scheduler.send_placed(name)
    await harness.until(lambda: len(harness.worker.prompts) == 2)
    again = harness.worker.prompts[1]
    assert list(again.token_ids[again.prompt_tokens :]) == IDS[:3]
    harness.worker.send(name, 3, IDS[3:], STOP)
    assert (await pending).text == WORDS


async def test_swapped_in_request_continues_and_its_gap_is_a_swap_in(
    harness: Harness, client: AsyncClient
) -> None:
    pending, name = await begin_answer(harness, client, 3, sla={"mtpot_s": 0.1})
    harness.scheduler.send_event(name, preempted=sched.Preempted(output_tokens=3))
    await harness.until(lambda: gauge(harness, "running") == 0)
    harness.scheduler.send_event(name, resumed=sched.Resumed(held_tokens=16))
    await harness.until(lambda: gauge(harness, "running") == 1)
    await asyncio.sleep(0.3)  # the swap
    harness.worker.send(name, 3, IDS[3:], STOP)
    assert (await pending).text == WORDS
    assert len(harness.worker.prompts) == 1
    missed = {"class": "custom", "outcome": "missed", "cause": "swap-in"}
    registry = harness.gateway.metrics.registry
    assert registry.get_sample_value("foretoken_sla_requests_total", missed) == 1


def gauge(harness: Harness, name: str) -> float | None:
    return harness.gateway.metrics.registry.get_sample_value(f"foretoken_num_requests_{name}")


async def test_every_submission_has_the_cache_salt(harness: Harness, client: AsyncClient) -> None:
    pending = asyncio.ensure_future(client.complete("1,", n=2, cache_salt="tenant a"))
    other = asyncio.ensure_future(client.complete("1,"))
    await harness.until(lambda: len(harness.worker.prompts) == 3)
    harness.worker.break_stream()
    await harness.until(lambda: len(harness.worker.prompts) == 6)
    for prompt in harness.worker.prompts[3:]:
        harness.worker.send(prompt.request_id, 0, IDS, STOP)
    await asyncio.gather(pending, other)
    for prompts in (harness.worker.prompts[:3], harness.worker.prompts[3:]):
        assert sorted(p.cache_salt for p in prompts) == ["", "tenant a", "tenant a"]


async def test_lost_tokens_are_resubmitted(harness: Harness, client: AsyncClient) -> None:
    pending = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(harness)
    harness.worker.send(name, 0, IDS[:2])
    harness.worker.send(name, 3, IDS[3:])
    await harness.until(lambda: len(harness.worker.prompts) == 2)
    again = harness.worker.prompts[1]
    assert again.request_id != name
    assert [c.request_id for c in harness.scheduler.cancels] == [name]
    assert harness.scheduler.requests[1].delivered_tokens == 2
    harness.worker.send(name, 2, tokens_of("nonsense"))
    harness.worker.send(again.request_id, 2, IDS[2:], STOP)
    assert (await pending).text == WORDS


async def test_broken_worker_stream_resubmits_on_the_next_stream(
    harness: Harness, client: AsyncClient
) -> None:
    pending = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(harness)
    harness.worker.send(name, 0, IDS[:2])
    harness.worker.break_stream()
    await harness.until(lambda: len(harness.worker.prompts) == 2)
    again = harness.worker.prompts[1]
    assert again.request_id != name
    assert [c.request_id for c in harness.scheduler.cancels] == [name]
    assert list(again.token_ids[again.prompt_tokens :]) == IDS[:2]
    assert again.sampling == harness.worker.prompts[0].sampling
    harness.worker.send(again.request_id, 2, IDS[2:], STOP)
    assert (await pending).text == WORDS
    assert harness.worker.opened == 2


async def test_lost_worker_s_requests_continue_elsewhere() -> None:
    async with run_harness() as harness, AsyncClient(harness.grpc_address) as client:
        pending, _ = await begin_answer(harness, client, 2)
        spare = type(harness.worker)()
        async with listening([worker_mount(spare)], "127.0.0.1:0") as server:
            harness.scheduler.worker_address = f"127.0.0.1:{server.port}"
            await harness.worker_server.stop(0)
            await harness.until(lambda: bool(spare.prompts))
            prompt = spare.prompts[0]
            assert harness.scheduler.requests[-1].delivered_tokens == 2
            spare.send(prompt.request_id, 2, IDS[2:], STOP)
            assert (await pending).text == WORDS


async def test_scheduler_may_place_a_lost_worker_s_request_first() -> None:
    async with (
        run_harness(connect_backoff_s=5) as harness,
        AsyncClient(harness.grpc_address) as client,
    ):
        pending = asyncio.ensure_future(client.complete("1,"))
        name = await first_prompt(harness)
        spare = type(harness.worker)()
        async with listening([worker_mount(spare)], "127.0.0.1:0") as server:
            await harness.worker_server.stop(0)
            harness.scheduler.send_placed(name, f"127.0.0.1:{server.port}")
            await harness.until(lambda: bool(spare.prompts))
            spare.send(name, 0, IDS, STOP)
            assert (await pending).text == WORDS
        assert len(harness.scheduler.requests) == 1


async def test_late_tokens_of_an_earlier_worker_are_dropped(
    harness: Harness, client: AsyncClient
) -> None:
    pending, name = await begin_answer(harness, client, 2)
    spare = type(harness.worker)()
    async with listening([worker_mount(spare)], "127.0.0.1:0") as server:
        harness.scheduler.send_event(name, preempted=sched.Preempted(output_tokens=2))
        harness.scheduler.send_placed(name, f"127.0.0.1:{server.port}")
        await harness.until(lambda: bool(spare.prompts))
        harness.worker.send(name, 2, IDS[:2], STOP)
        other = asyncio.ensure_future(client.complete("1,"))
        await harness.until(lambda: len(harness.worker.prompts) == 2)
        harness.worker.send(harness.worker.prompts[1].request_id, 0, IDS, STOP)
        assert (await other).text == WORDS  # the late tokens came before it
        spare.send(name, 2, IDS[2:], STOP)
        assert (await pending).text == WORDS


async def test_answer_that_lacks_only_its_end_is_not_resubmitted(
    harness: Harness, client: AsyncClient
) -> None:
    pending = asyncio.ensure_future(client.complete("1,", max_tokens=3))
    name = await first_prompt(harness)
    harness.worker.send(name, 0, IDS[:3])
    harness.worker.break_stream()
    answer = await pending
    assert (answer.choices[0].token_ids, answer.finish_reason) == (IDS[:3], FinishReason.LENGTH)
    assert len(harness.scheduler.requests) == 1


async def test_end_without_its_tokens_is_resubmitted() -> None:
    async with (
        run_harness(finish_wait_s=0.1) as harness,
        AsyncClient(harness.grpc_address) as client,
    ):
        pending = asyncio.ensure_future(client.complete("1,"))
        name = await first_prompt(harness)
        harness.worker.send(name, 0, IDS[:2])
        harness.scheduler.send_event(
            name, finished=sched.Finished(reason=STOP, output_tokens=len(IDS))
        )
        await harness.until(lambda: len(harness.worker.prompts) == 2)
        harness.worker.send(harness.worker.prompts[1].request_id, 2, IDS[2:], STOP)
        assert (await pending).text == WORDS


async def test_returning_scheduler_receives_announcements(
    harness: Harness, client: AsyncClient
) -> None:
    """A request on a live worker continues there under its id; others are submitted again."""
    pending = [asyncio.ensure_future(client.complete("1,")) for _ in range(2)]
    await harness.until(lambda: len(harness.worker.prompts) == 2)
    first, second = (prompt.request_id for prompt in harness.worker.prompts)
    harness.scheduler.place = False
    pending.append(asyncio.ensure_future(client.complete("1,")))
    await harness.until(lambda: len(harness.scheduler.requests) == 3)
    queued = harness.scheduler.requests[2].request_id
    harness.worker.send(first, 0, IDS[:2])
    await harness.until(lambda: harness.gateway.metrics.generation_tokens._value.get() == 2)

    harness.scheduler.break_stream()
    await harness.until(lambda: len(harness.scheduler.requests) == 6)
    reported = {r.request_id: r for r in harness.scheduler.requests[3:]}
    assert (reported[first].worker_id, reported[first].delivered_tokens) == ("w", 2)
    assert (reported[second].worker_id, reported[second].delivered_tokens) == ("w", 0)
    assert reported[first].text.user_input == "1,"
    (anew,) = reported.keys() - {first, second}
    assert (reported[anew].worker_id, anew != queued) == ("", True)

    harness.worker.send(first, 2, IDS[2:3])  # before the scheduler answers
    harness.scheduler.send_placed(first)
    harness.scheduler.send_event(second, resumed=sched.Resumed(held_tokens=2))
    harness.scheduler.send_placed(anew)
    await harness.until(lambda: len(harness.worker.prompts) == 3)
    assert harness.worker.prompts[2].request_id == anew
    for name, done in ((first, 3), (second, 0), (anew, 0)):
        harness.worker.send(name, done, IDS[done:], STOP)
    assert [answer.text for answer in await asyncio.gather(*pending)] == [WORDS] * 3
    assert not harness.scheduler.cancels
    assert resubmissions(harness, "scheduler") == 1


async def test_returning_scheduler_may_move_a_request() -> None:
    async with run_harness() as harness, AsyncClient(harness.grpc_address) as client:
        pending, name = await begin_answer(harness, client, 2)
        harness.scheduler.place = False
        harness.scheduler.break_stream()
        await harness.until(lambda: len(harness.scheduler.requests) == 2)
        spare = type(harness.worker)()
        async with listening([worker_mount(spare)], "127.0.0.1:0") as server:
            harness.scheduler.send_placed(name, f"127.0.0.1:{server.port}")
            await harness.until(lambda: bool(spare.prompts))
            (prompt,) = spare.prompts
            assert prompt.request_id == name
            assert list(prompt.token_ids[prompt.prompt_tokens :]) == IDS[:2]
            spare.send(name, 2, IDS[2:], STOP)
            assert (await pending).text == WORDS


async def test_worker_and_scheduler_lost_together_are_recovered(
    harness: Harness, client: AsyncClient
) -> None:
    pending, name = await begin_answer(harness, client, 2)
    harness.scheduler.break_stream()
    harness.worker.break_stream()
    await harness.until(lambda: len(harness.worker.prompts) == 2)
    again = harness.worker.prompts[1]
    assert again.request_id != name
    harness.worker.send(again.request_id, 2, IDS[2:], STOP)
    assert (await pending).text == WORDS


async def wait_for_prompts(harness: Harness, count: int) -> None:
    """Waits until the worker has that many prompts."""
    await harness.until(lambda: len(harness.worker.prompts) == count)


def resubmissions(harness: Harness, cause: str) -> float | None:
    registry = harness.gateway.metrics.registry
    return registry.get_sample_value("foretoken_resubmissions_total", {"cause": cause})


@pytest.mark.slow
async def test_repeated_loss_without_progress_spends_the_retry_budget() -> None:
    made = run_harness(retry_share=0.0, retry_floor_per_s=0.2)  # two in ten seconds
    async with made as harness, AsyncClient(harness.grpc_address) as client:
        pending = asyncio.ensure_future(client.complete("1,"))
        for attempt in range(4):
            await wait_for_prompts(harness, attempt + 1)
            harness.worker.break_stream()
        with pytest.raises(Unavailable, match="the retry budget is exhausted") as caught:
            await pending
        assert caught.value.retry_after_s == 1.0
        assert resubmissions(harness, "worker") == 3  # the first is free


async def test_loss_after_progress_needs_no_retry_budget() -> None:
    made = run_harness(retry_share=0.0, retry_floor_per_s=0.0)
    async with made as harness, AsyncClient(harness.grpc_address) as client:
        pending = asyncio.ensure_future(client.complete("1,"))
        for done in range(4):
            await wait_for_prompts(harness, done + 1)
            harness.worker.send(harness.worker.prompts[-1].request_id, done, IDS[done : done + 1])
            harness.worker.break_stream()
        await harness.until(lambda: len(harness.worker.prompts) == 5)
        harness.worker.send(harness.worker.prompts[-1].request_id, 4, IDS[4:], STOP)
        assert (await pending).text == WORDS


async def test_request_finishes_while_the_scheduler_is_lost(
    harness: Harness, client: AsyncClient
) -> None:
    pending = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(harness)
    await harness.scheduler_server.stop(0)
    harness.worker.send(name, 0, IDS, STOP)
    assert (await pending).text == WORDS


async def test_long_scheduler_loss_fails_the_request() -> None:
    async with (
        run_harness(scheduler_wait_s=0.2) as harness,
        AsyncClient(harness.grpc_address) as client,
    ):
        pending = asyncio.ensure_future(client.complete("1,"))
        await first_prompt(harness)
        await harness.scheduler_server.stop(0)
        with pytest.raises(Unavailable, match="the scheduler is not reachable"):
            await pending


async def test_restarted_scheduler_serves_waiting_requests() -> None:
    async with run_harness() as harness, AsyncClient(harness.grpc_address) as client:
        port = harness.scheduler_server.port
        await harness.scheduler_server.stop(0)
        await harness.until(lambda: not harness.gateway.ready)
        pending = asyncio.ensure_future(client.complete("1,"))
        await harness.until(lambda: harness.gateway.live == 1)
        async with listening([scheduler_mount(harness.scheduler)], f"127.0.0.1:{port}"):
            name = await first_prompt(harness)
            harness.worker.send(name, 0, IDS, STOP)
            assert (await pending).text == WORDS

"""Requests evicted or swapped, or whose tokens, worker or scheduler are lost, go on or say why."""

import asyncio

import pytest

from foretoken import AsyncClient, Unavailable
from protos.generated import scheduler_pb2 as sched
from services.core import FinishReason
from services.runtime.server import listening
from tests.gateway.gateway_fakes import House, housing, serves, tokens_of, works
from tests.gateway.gateway_fixtures import IDS, STOP, WORDS, first_prompt
from tests.gateway.gateway_fixtures import client as client
from tests.gateway.gateway_fixtures import house as house


async def test_evicted_request_continues_where_it_was(house: House, client: AsyncClient) -> None:
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


async def test_swapped_in_request_continues_and_its_gap_is_a_swap_in(
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
    missed = {"class": "custom", "outcome": "missed", "cause": "swap-in"}
    registry = house.gateway.metrics.registry
    assert registry.get_sample_value("foretoken_sla_requests_total", missed) == 1


def gauge(house: House, of: str) -> float | None:
    return house.gateway.metrics.registry.get_sample_value(f"foretoken_num_requests_{of}")


async def test_every_submission_has_the_cache_salt(house: House, client: AsyncClient) -> None:
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


async def test_lost_tokens_are_resubmitted(house: House, client: AsyncClient) -> None:
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


async def test_broken_worker_stream_resubmits_on_the_next_stream(
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


async def test_lost_worker_s_requests_continue_elsewhere() -> None:
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


async def test_scheduler_may_place_a_lost_worker_s_request_first() -> None:
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


async def test_answer_that_lacks_only_its_end_is_not_resubmitted(
    house: House, client: AsyncClient
) -> None:
    asking = asyncio.ensure_future(client.complete("1,", max_tokens=3))
    name = await first_prompt(house)
    house.worker.send(name, 0, IDS[:3])
    house.worker.break_stream()
    answer = await asking
    assert (answer.choices[0].token_ids, answer.finish_reason) == (IDS[:3], FinishReason.LENGTH)
    assert len(house.scheduler.requests) == 1


async def test_end_without_its_tokens_is_resubmitted() -> None:
    async with housing(finish_wait_s=0.1) as house, AsyncClient(house.grpc_address) as client:
        asking = asyncio.ensure_future(client.complete("1,"))
        name = await first_prompt(house)
        house.worker.send(name, 0, IDS[:2])
        house.scheduler.tell(name, finished=sched.Finished(reason=STOP, output_tokens=len(IDS)))
        await house.until(lambda: len(house.worker.prompts) == 2)
        house.worker.send(house.worker.prompts[1].request_id, 2, IDS[2:], STOP)
        assert (await asking).text == WORDS


async def test_returning_scheduler_receives_announcements(
    house: House, client: AsyncClient
) -> None:
    """A request on a live worker continues there under its id; others are submitted again."""
    asking = [asyncio.ensure_future(client.complete("1,")) for _ in range(2)]
    await house.until(lambda: len(house.worker.prompts) == 2)
    first, second = (prompt.request_id for prompt in house.worker.prompts)
    house.scheduler.place = False
    asking.append(asyncio.ensure_future(client.complete("1,")))
    await house.until(lambda: len(house.scheduler.requests) == 3)
    queued = house.scheduler.requests[2].request_id
    house.worker.send(first, 0, IDS[:2])
    await house.until(lambda: house.gateway.metrics.generation_tokens._value.get() == 2)

    house.scheduler.break_stream()
    await house.until(lambda: len(house.scheduler.requests) == 6)
    reported = {r.request_id: r for r in house.scheduler.requests[3:]}
    assert (reported[first].worker_id, reported[first].delivered_tokens) == ("w", 2)
    assert (reported[second].worker_id, reported[second].delivered_tokens) == ("w", 0)
    assert reported[first].text.user_input == "1,"
    (anew,) = reported.keys() - {first, second}
    assert (reported[anew].worker_id, anew != queued) == ("", True)

    house.worker.send(first, 2, IDS[2:3])  # comes before the scheduler has said anything
    house.scheduler.tell_placed(first)
    house.scheduler.tell(second, resumed=sched.Resumed(held_tokens=2))
    house.scheduler.tell_placed(anew)
    await house.until(lambda: len(house.worker.prompts) == 3)
    assert house.worker.prompts[2].request_id == anew
    for name, done in ((first, 3), (second, 0), (anew, 0)):
        house.worker.send(name, done, IDS[done:], STOP)
    assert [answer.text for answer in await asyncio.gather(*asking)] == [WORDS] * 3
    assert not house.scheduler.cancels
    assert resubmissions(house, "scheduler") == 1


async def test_returning_scheduler_may_move_a_request() -> None:
    async with housing() as house, AsyncClient(house.grpc_address) as client:
        asking = asyncio.ensure_future(client.complete("1,"))
        name = await first_prompt(house)
        house.worker.send(name, 0, IDS[:2])
        await house.until(lambda: house.gateway.metrics.generation_tokens._value.get() == 2)
        house.scheduler.place = False
        house.scheduler.break_stream()
        await house.until(lambda: len(house.scheduler.requests) == 2)
        spare = type(house.worker)()
        async with listening([works(spare)], "127.0.0.1:0") as server:
            house.scheduler.tell_placed(name, f"127.0.0.1:{server.port}")
            await house.until(lambda: bool(spare.prompts))
            (prompt,) = spare.prompts
            assert prompt.request_id == name
            assert list(prompt.token_ids[prompt.prompt_tokens :]) == IDS[:2]
            spare.send(name, 2, IDS[2:], STOP)
            assert (await asking).text == WORDS


async def test_worker_and_scheduler_lost_together_are_recovered(
    house: House, client: AsyncClient
) -> None:
    asking = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(house)
    house.worker.send(name, 0, IDS[:2])
    await house.until(lambda: house.gateway.metrics.generation_tokens._value.get() == 2)
    house.scheduler.break_stream()
    house.worker.break_stream()
    await house.until(lambda: len(house.worker.prompts) == 2)
    again = house.worker.prompts[1]
    assert again.request_id != name
    house.worker.send(again.request_id, 2, IDS[2:], STOP)
    assert (await asking).text == WORDS


async def prompts(house: House, count: int) -> None:
    """Until the worker has been sent that many."""
    await house.until(lambda: len(house.worker.prompts) == count)


def resubmissions(house: House, cause: str) -> float | None:
    registry = house.gateway.metrics.registry
    return registry.get_sample_value("foretoken_resubmissions_total", {"cause": cause})


async def test_repeated_loss_without_progress_spends_the_retry_budget() -> None:
    made = housing(retry_share=0.0, retry_floor_per_s=0.2)  # two in ten seconds
    async with made as house, AsyncClient(house.grpc_address) as client:
        asking = asyncio.ensure_future(client.complete("1,"))
        for attempt in range(4):
            await prompts(house, attempt + 1)
            house.worker.break_stream()
        with pytest.raises(Unavailable, match="the retry budget is exhausted") as caught:
            await asking
        assert caught.value.retry_after_s == 1.0
        assert resubmissions(house, "worker") == 3  # the first is free


async def test_loss_after_progress_needs_no_retry_budget() -> None:
    made = housing(retry_share=0.0, retry_floor_per_s=0.0)
    async with made as house, AsyncClient(house.grpc_address) as client:
        asking = asyncio.ensure_future(client.complete("1,"))
        for done in range(4):
            await prompts(house, done + 1)
            house.worker.send(house.worker.prompts[-1].request_id, done, IDS[done : done + 1])
            house.worker.break_stream()
        await house.until(lambda: len(house.worker.prompts) == 5)
        house.worker.send(house.worker.prompts[-1].request_id, 4, IDS[4:], STOP)
        assert (await asking).text == WORDS


async def test_request_finishes_while_the_scheduler_is_lost(
    house: House, client: AsyncClient
) -> None:
    asking = asyncio.ensure_future(client.complete("1,"))
    name = await first_prompt(house)
    await house.scheduler_server.stop(0)
    house.worker.send(name, 0, IDS, STOP)
    assert (await asking).text == WORDS


async def test_long_scheduler_loss_fails_the_request() -> None:
    async with housing(scheduler_wait_s=0.2) as house, AsyncClient(house.grpc_address) as client:
        asking = asyncio.ensure_future(client.complete("1,"))
        await first_prompt(house)
        await house.scheduler_server.stop(0)
        with pytest.raises(Unavailable, match="the scheduler is not reachable"):
            await asking


async def test_restarted_scheduler_serves_waiting_requests() -> None:
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

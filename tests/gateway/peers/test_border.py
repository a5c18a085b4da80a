"""What workers and the scheduler may send to a gateway."""

import asyncio
from typing import Any

import pytest

from foretoken import AsyncClient
from gateway.peers.border import check_event, check_tokens
from protos.generated import common_pb2, scheduler_pb2, worker_pb2
from services.runtime.errors import InvalidArgument
from tests.gateway.gateway_fakes import Harness
from tests.gateway.gateway_fixtures import IDS, STOP, WORDS, first_prompt
from tests.gateway.gateway_fixtures import client as client
from tests.gateway.gateway_fixtures import harness as harness

NAN = float("nan")


def batch(**tokens: Any) -> worker_pb2.TokenBatch:
    return worker_pb2.TokenBatch(requests=[worker_pb2.RequestTokens(request_id="a", **tokens)])


def score(**values: Any) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=1, **values)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (batch(token_ids=[1, 9, 100]), "token_ids: must be below 100, .*, got 100"),
        (batch(finish_reason=5, message="x" * 70_000), "message: must have at most"),
        (batch(token_ids=[1], logprobs=[score(), score()]), "logprobs: must be at most one"),
        (batch(token_ids=[1], logprobs=[score(logprob=NAN)]), "logprobs: must not be NaN"),
        (batch(token_ids=[1], logprobs=[score(top_ids=[1])]), "logprobs: has top_ids"),
        (
            batch(prompt_logprobs=[score(top_ids=[1], top_logprobs=[NAN])]),
            "prompt_logprobs: must not be NaN",
        ),
    ],
)
def test_impossible_tokens_are_named(message: worker_pb2.TokenBatch, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{sentence}"):
        check_tokens(message, 100)


def test_all_of_the_vocabulary_may_come() -> None:
    infinite = score(logprob=-float("inf"), top_ids=[2**32 - 1], top_logprobs=[-0.5])
    check_tokens(batch(token_ids=[0, 99], logprobs=[score(), infinite]), 100)


def event(**kind: Any) -> scheduler_pb2.SchedulerEvent:
    return scheduler_pb2.SchedulerEvent(request=scheduler_pb2.RequestEvent(**kind))


def fleet(**worker: Any) -> scheduler_pb2.SchedulerEvent:
    given = {"address": "unix:/w", "kv_tokens": 1, "max_context_tokens": 1, **worker}
    info = scheduler_pb2.WorkerInfo(**given)
    return scheduler_pb2.SchedulerEvent(fleet=scheduler_pb2.FleetView(workers=[info]))


def warned(*warnings: str) -> scheduler_pb2.SchedulerEvent:
    return scheduler_pb2.SchedulerEvent(fleet=scheduler_pb2.FleetView(warnings=warnings))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (event(placed=scheduler_pb2.Placed()), "placed.worker_address"),
        (event(rejected=scheduler_pb2.Rejected(retry_after_s=NAN)), "retry_after_s"),
        (event(rejected=scheduler_pb2.Rejected(retry_after_s=-1)), "retry_after_s"),
        (event(finished=scheduler_pb2.Finished(output_tokens=2**32 - 1)), "output_tokens"),
        (event(length_bound=scheduler_pb2.LengthBound()), "output_tokens"),
        (fleet(address=""), "fleet.workers.address"),
        (fleet(kv_tokens=0), "kv_tokens"),
        (fleet(max_context_tokens=0), "max_context_tokens"),
        (scheduler_pb2.SchedulerEvent(fleet=scheduler_pb2.FleetView(drain_s=NAN)), "drain_s"),
        (warned(*["x"] * 17), "fleet.warnings"),
        (warned("x" * 1_025), "fleet.warnings"),
    ],
)
def test_impossible_events_are_named(message: scheduler_pb2.SchedulerEvent, field: str) -> None:
    check_event(fleet())
    check_event(scheduler_pb2.SchedulerEvent())
    with pytest.raises(InvalidArgument, match=f"^{field}: must "):
        check_event(message)


def invalid(harness: Harness, method: str, field: str) -> float:
    registry, labels = harness.gateway.metrics.registry, {"method": method, "field": field}
    name = "foretoken_gateway_invalid_messages_total"
    return registry.get_sample_value(name, labels) or 0.0


async def test_worker_with_impossible_tokens_loses_its_stream_and_the_answer_goes_on(
    harness: Harness, client: AsyncClient
) -> None:
    answer = asyncio.ensure_future(client.complete("1,"))
    first = await first_prompt(harness)
    harness.worker.send(first, 0, IDS[:2])
    harness.worker.send(first, 2, [10**6])
    await harness.until(lambda: len(harness.worker.prompts) == 2)
    again = harness.worker.prompts[1]
    assert list(again.token_ids)[again.prompt_tokens :] == IDS[:2]
    assert invalid(harness, "Stream", "token_ids") == 1
    harness.worker.send(again.request_id, 2, IDS[2:], STOP)
    assert (await answer).text == WORDS


async def test_worker_with_more_cached_tokens_than_the_prompt_has_loses_its_stream(
    harness: Harness, client: AsyncClient
) -> None:
    answer = asyncio.ensure_future(client.complete("1,"))
    await first_prompt(harness)
    first = harness.worker.prompts[0]
    tokens = worker_pb2.RequestTokens(request_id=first.request_id, token_ids=IDS[:1])
    tokens.cached_tokens = first.prompt_tokens + 1
    harness.worker.streams[-1].put_nowait(worker_pb2.TokenBatch(requests=[tokens]))
    await harness.until(lambda: len(harness.worker.prompts) == 2)
    assert invalid(harness, "Stream", "cached_tokens") == 1
    harness.worker.send(harness.worker.prompts[1].request_id, 0, IDS, STOP)
    assert (await answer).text == WORDS


async def test_scheduler_with_impossible_event_loses_its_stream(harness: Harness) -> None:
    harness.scheduler.send_event("a", rejected=scheduler_pb2.Rejected(retry_after_s=NAN))
    await harness.until(lambda: len(harness.scheduler.hellos) == 2)
    assert invalid(harness, "Submit", "retry_after_s") == 1

"""Failing batchers: the load is served in every case."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from protos.generated import batcher_pb2, batcher_pb2_grpc
from services.batcher.config import BatcherConfig
from services.batcher.service import BatcherService
from services.policies.preset import choose
from services.runtime.channel import connect
from services.runtime.tasks import background
from services.scheduler.core import events as ev
from tests.batcher.arranging import ADD, NAME, Answers, Apart, apart, two_wait
from tests.batcher.recorded_load import Recorder
from tests.reach import reaching, until


class Silent(batcher_pb2_grpc.BatcherServicer):
    """Takes what it is recorded, and sleeps."""

    def __init__(self) -> None:
        self.streams = 0

    async def Arrange(self, requests: Any, context: object) -> Answers:
        self.streams += 1
        async for message in requests:
            if message.HasField("candidates"):
                await asyncio.sleep(3_600)
                yield batcher_pb2.Arrangement()


class Wrong(BatcherService):
    """Answers what it should, spoilt."""

    def __init__(self, spoil: Callable[[batcher_pb2.Arrangement], None]) -> None:
        super().__init__(BatcherConfig(), CollectorRegistry())
        self._spoil = spoil

    async def Arrange(self, requests: Any, context: object) -> Answers:
        async for answer in super().Arrange(requests, context):
            self._spoil(answer)
            yield answer


class Refusing(batcher_pb2_grpc.BatcherServicer):
    async def Arrange(self, requests: Any, context: Any) -> Answers:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "hello: unknown here")
        yield batcher_pb2.Arrangement()


def first_run(answer: batcher_pb2.Arrangement) -> batcher_pb2.WorkerDecision:
    """A decision that runs a request; without one it runs a row that is free."""
    found = next((each for each in answer.workers if each.run), None)
    if found is None:
        no_such_row(answer)
    return found or answer.workers[0]


def no_such_row(answer: batcher_pb2.Arrangement) -> None:
    answer.workers[0].run.append(4_000_000)
    answer.workers[0].limits.append(10)


def free_row(answer: batcher_pb2.Arrangement) -> None:
    answer.workers[0].run.append(255)
    answer.workers[0].limits.append(10)


def too_few_limits(answer: batcher_pb2.Arrangement) -> None:
    decision = first_run(answer)
    decision.limits.append(9)


def limits_without_bound(answer: batcher_pb2.Arrangement) -> None:
    decision = first_run(answer)
    decision.limits[0] = 2**64 - 1


def limits_of_nothing(answer: batcher_pb2.Arrangement) -> None:
    decision = first_run(answer)
    decision.limits[0] = 0


def twice(answer: batcher_pb2.Arrangement) -> None:
    decision = first_run(answer)
    decision.run.append(decision.run[0])
    decision.limits.append(decision.limits[0])


def pauses_all(answer: batcher_pb2.Arrangement) -> None:
    for decision in answer.workers:
        decision.pause.extend(decision.run or [255])


def strange_victims(answer: batcher_pb2.Arrangement) -> None:
    answer.workers[0].victims.append(4_000_000)


def elsewhere(answer: batcher_pb2.Arrangement) -> None:
    for decision in answer.workers:
        decision.worker += 1


def no_portions(answer: batcher_pb2.Arrangement) -> None:
    del answer.workers[:]


def never_again(answer: batcher_pb2.Arrangement) -> None:
    answer.not_before_s = float("inf")


def no_time(answer: batcher_pb2.Arrangement) -> None:
    answer.next_s = float("nan")


def time_gone_by(answer: batcher_pb2.Arrangement) -> None:
    answer.next_s = -1.0


SPOILS = (
    no_such_row, free_row, too_few_limits, limits_without_bound, limits_of_nothing, twice,
    pauses_all, strange_victims, elsewhere, no_portions, never_again, no_time, time_gone_by,
)  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
async def test_invalid_arrangement_is_not_applied(
    spoil: Callable[[batcher_pb2.Arrangement], None],
) -> None:
    recorded = Recorder(choose("alise"), requests=12).recorded
    async with apart(Wrong(spoil), "alise") as there:
        rounds = await there.same_as(recorded)
    assert there.by("wrong") >= 1
    assert there.by("batcher") == 0
    assert there.by("wrong") + there.by("gone") == rounds


async def test_scheduler_arranges_round_after_batcher_admits_nothing() -> None:
    def holds_back(answer: batcher_pb2.Arrangement) -> None:
        for decision in answer.workers:
            del decision.run[:], decision.limits[:], decision.victims[:], decision.pause[:]

    recorded = Recorder(choose("fcfs"), requests=12).recorded
    async with apart(Wrong(holds_back), "fcfs") as there:
        first = next(i for i, (_, _, actions) in enumerate(recorded) if has_place(actions))
        await there.same_as(recorded[: first + 1])
    assert there.by("wrong") == 1


def has_place(actions: list[ev.Action]) -> bool:
    return any(isinstance(action, ev.Place) for action in actions)


async def test_link_ignores_answer_to_another_round() -> None:
    def another(answer: batcher_pb2.Arrangement) -> None:
        answer.round += 1

    recorded = Recorder(choose("fcfs"), requests=12).recorded
    async with apart(Wrong(another), "fcfs", timeout_s=0.05) as there:
        rounds = await there.same_as(recorded)
    assert there.by("batcher") == 0
    assert there.by("late") >= 1
    assert there.by("late") + there.by("gone") == rounds


async def test_late_batcher_is_disconnected_and_asked_again_after_backoff() -> None:
    recorded = Recorder(choose("fcfs"), requests=12).recorded
    servicer = Silent()
    async with apart(servicer, "fcfs", timeout_s=0.02) as there:
        rounds = await there.same_as(recorded)
        assert there.by("late") + there.by("gone") == rounds
        assert there.by("late") >= 1
        await until(lambda: servicer.streams > 1)


async def test_batcher_that_refuses_preset_does_not_end_link() -> None:
    recorded = Recorder(choose("fcfs"), requests=12).recorded
    async with reaching("socket", NAME, ADD, Refusing()) as channel:
        there = Apart(channel, choose("fcfs"))
        async with background(there.arranger.run()):
            rounds = await there.same_as(recorded)
    assert there.by("gone") == rounds > 0


async def test_absent_batcher_is_not_waited_for() -> None:
    recorded = Recorder(choose("fcfs"), requests=12).recorded
    channel = connect("unix:/absent")
    there = Apart(channel, choose("fcfs"))
    async with background(there.arranger.run()):
        rounds = await there.same_as(recorded)
    assert there.by("gone") == rounds > 0
    await channel.close()


async def test_pending_round_is_arranged_by_scheduler_when_stream_ends() -> None:
    """The batcher dies with the question in hand."""

    class Dying(batcher_pb2_grpc.BatcherServicer):
        async def Arrange(self, requests: Any, context: Any) -> Answers:
            async for message in requests:
                if message.HasField("candidates"):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            yield batcher_pb2.Arrangement()

    recorded = Recorder(choose("fcfs"), requests=12).recorded
    async with apart(Dying(), "fcfs") as there:
        rounds = await there.same_as(recorded)
    assert there.by("gone") == rounds


async def test_cancelled_link_leaves_no_timer_and_dispatches_nothing() -> None:
    async with apart(Silent(), "fcfs", timeout_s=0.05) as there:
        there.arranger.ask(two_wait())
    await asyncio.sleep(0.1)
    assert there.arranged.empty()

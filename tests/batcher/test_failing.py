"""Failing batchers: the scheduler serves the load in every case."""

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
from services.runtime.network.channel import connect
from services.runtime.tasks import background
from services.scheduler.core import events as ev
from tests.batcher.arranging import ADD, NAME, Answers, Apart, apart, two_wait
from tests.batcher.recorded_load import Recorder
from tests.reach import reaching, until


class Silent(batcher_pb2_grpc.BatcherServicer):
    """A batcher that records messages and never answers."""

    def __init__(self) -> None:
        self.streams = 0

    async def Arrange(self, requests: Any, context: object) -> Answers:
        self.streams += 1
        async for message in requests:
            if message.HasField("candidates"):
                await asyncio.sleep(3_600)
                yield batcher_pb2.Arrangement()


class Wrong(BatcherService):
    """A batcher with answers that the given function alters."""

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
    """The first decision that runs a request; if none does, the first one runs a free row."""
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


def limits_above_cap(answer: batcher_pb2.Arrangement) -> None:
    decision = first_run(answer)
    decision.limits[0] = 2**64 - 1


def limits_of_zero(answer: batcher_pb2.Arrangement) -> None:
    decision = first_run(answer)
    decision.limits[0] = 0


def runs_row_twice(answer: batcher_pb2.Arrangement) -> None:
    decision = first_run(answer)
    decision.run.append(decision.run[0])
    decision.limits.append(decision.limits[0])


def pauses_all(answer: batcher_pb2.Arrangement) -> None:
    for decision in answer.workers:
        decision.pause.extend(decision.run or [255])


def victims_that_do_not_run(answer: batcher_pb2.Arrangement) -> None:
    answer.workers[0].victims.append(4_000_000)


def runs_at_another_worker(answer: batcher_pb2.Arrangement) -> None:
    for decision in answer.workers:
        decision.worker += 1


def no_decisions(answer: batcher_pb2.Arrangement) -> None:
    del answer.workers[:]


def infinite_wait(answer: batcher_pb2.Arrangement) -> None:
    answer.not_before_s = float("inf")


def nan_time(answer: batcher_pb2.Arrangement) -> None:
    answer.next_s = float("nan")


def round_due_in_past(answer: batcher_pb2.Arrangement) -> None:
    answer.next_s = -1.0


SPOILS = (
    no_such_row, free_row, too_few_limits, limits_above_cap, limits_of_zero, runs_row_twice,
    pauses_all, victims_that_do_not_run, runs_at_another_worker, no_decisions, infinite_wait,
    nan_time, round_due_in_past,
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
    """The batcher ends its stream while a round is pending."""

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

"""Outcomes sent to the predictor, and the refresh of shared forecasts after them."""

import asyncio
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from protos.generated import predictor_pb2
from services.core import LiveAnswers
from services.predictor.config import PredictorConfig
from services.predictor.service import PredictorService
from services.runtime.network.delivery import Backlog
from services.runtime.tasks import background
from services.scheduler.core import events as ev
from tests.reach import until
from tests.scheduler.links.link_fixtures import (
    PATIENT,
    FakePredictor,
    Owner,
    asking,
    learning,
    predictor_at,
    refusal,
    request,
    running_peers,
    socket_in,
)

NAMES = [f"r{i}" for i in range(5)]


async def test_outcomes_are_delivered_in_order_after_outage(
    tmp_path: Path,
) -> None:
    owner, predictor = Owner(), FakePredictor()
    async with running_peers(owner, socket_in(tmp_path), refresh_interval_s=0.01) as peers:
        for learn in learning(NAMES[:2]):
            peers.learn(learn)
            await asyncio.sleep(0.05)  # delivery of the first fails before the second is added
        async with predictor_at(socket_in(tmp_path), predictor):
            await until(lambda: predictor.outcomes == NAMES[:2])
        for learn in learning(NAMES[2:]):
            peers.learn(learn)
        async with predictor_at(socket_in(tmp_path), predictor):
            await until(lambda: predictor.outcomes == NAMES)
    assert owner.value("advice_dropped_total", kind="outcome") == 0


async def test_outcomes_are_sent_with_the_live_answers_of_that_time(tmp_path: Path) -> None:
    owner, predictor = Owner(), FakePredictor()
    async with (
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(owner, socket_in(tmp_path), refresh_interval_s=0.01) as peers,
    ):
        for name, live in (("r0", [LiveAnswers("demo", "copy", (3, 70))]), ("r1", [])):
            owner.live = live
            peers.learn(*learning([name]))
            await until(lambda: predictor.outcomes[-1:] == [name])  # noqa: B023, awaited at once
            assert predictor.live == live


async def test_permanently_refused_outcome_is_dropped(tmp_path: Path) -> None:
    owner, predictor = Owner(), _RefusingPredictor()
    async with (
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(owner, socket_in(tmp_path), refresh_interval_s=0.01) as peers,
    ):
        for learn in learning(["bad", "good"]):
            peers.learn(learn)
            await asyncio.sleep(0.05)
        await until(lambda: predictor.outcomes == ["good"])


class _RefusingPredictor(FakePredictor):
    async def Observe(self, request, context):
        if request.outcomes[0].request_id == "bad":
            raise refusal(grpc.StatusCode.INVALID_ARGUMENT)
        return await super().Observe(request, context)


async def test_shared_forecasts_are_refreshed_after_learning(
    tmp_path: Path,
) -> None:
    """Shared forecasts are not truncated at the max_tokens of the request that asks."""
    owner, predictor = Owner(), FakePredictor(tokens=40, shared_key="demo")
    owner.shared = [request("short", max_tokens=16)]
    settings = PATIENT | {"refresh_interval_s": 0.01}
    async with (
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(owner, socket_in(tmp_path), **settings) as peers,
    ):
        predictor.version = 1
        peers.learn(*learning(["a"]))
        await until(lambda: len(owner.events) == 1)
        peers.learn(*learning(["b"]))  # the version is unchanged: no refresh
        await until(lambda: predictor.outcomes == ["a", "b"])
        predictor.version = 2
        predictor.refusals = [refusal(grpc.StatusCode.INTERNAL)]
        peers.learn(*learning(["c"]))  # the version is new, but the refresh fails: it is retried
        await until(lambda: not predictor.refusals)
        peers.learn(*learning(["d"]))
        await until(lambda: len(owner.events) == 2)
    for event in owner.events:
        assert isinstance(event, ev.Refreshed)
        assert [(f.shared_key, f.mean()) for f in event.forecasts] == [("demo", 40)]
    assert predictor.names() == [["short"]] * 3


async def test_links_work_with_real_predictor(tmp_path: Path) -> None:
    owner = Owner()
    owner.shared = [request("a")]
    predictor = PredictorService(PredictorConfig(), CollectorRegistry())
    async with (
        background(predictor.run()),
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(owner, socket_in(tmp_path), **PATIENT) as peers,
    ):
        peers.forecasts.ask(asking("a"))
        await until(lambda: bool(owner.events))
        for learn in learning(["a", "b"]):
            peers.learn(learn)
        await until(lambda: len(owner.events) == 2)
    [first], renewed = owner.forecasts("a"), owner.events[1]
    assert first.source == "history"
    assert isinstance(renewed, ev.Refreshed)
    assert [f.shared_key for f in renewed.forecasts] == [first.shared_key]


async def test_backlog_drops_and_counts_oldest() -> None:
    owner = Owner()
    backlog: Backlog[int] = Backlog(3, owner.metrics.advice_dropped.labels("outcome"))
    for number in range(5):
        backlog.put(number)
    assert await backlog.pop(2) == [2, 3]
    backlog.put(5)
    assert await backlog.pop(9) == [4, 5]
    assert owner.value("advice_dropped_total", kind="outcome") == 2
    waiting = asyncio.ensure_future(backlog.pop(9))
    await asyncio.sleep(0)
    backlog.put(6)
    assert await waiting == [6]


async def test_endings_without_outcome_are_delivered_in_batches_with_the_name_of_the_scheduler(
    tmp_path: Path,
) -> None:
    owner, predictor = Owner(), FakePredictor()
    async with running_peers(owner, socket_in(tmp_path), name="s-1") as peers:
        for name in NAMES:
            peers.outcomes.put(name)
        peers.learn(*learning(["a"]))
        async with predictor_at(socket_in(tmp_path), predictor):
            await peers.outcomes.wait_delivered()
    assert sorted(predictor.ended) == NAMES and predictor.outcomes == ["a"]
    assert predictor.reporters == {"s-1"}


async def test_warning_of_the_predictor_is_kept_until_it_is_withdrawn(tmp_path: Path) -> None:
    owner, predictor = Owner(), FakePredictor()
    async with (
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(owner, socket_in(tmp_path)) as peers,
    ):
        await until(lambda: bool(predictor.followers))
        for warning, kept in (("the log is full", ("the log is full",)), ("", ())):
            message = predictor_pb2.ImprovedForecasts(warning=warning)
            predictor.followers[0].put_nowait(message)
            await until(lambda: peers.warnings == kept)  # noqa: B023, awaited at once

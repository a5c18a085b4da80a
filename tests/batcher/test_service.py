"""The separate batcher on a real socket makes the same decisions as the in-process one."""

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from observability.metrics import batcher as catalogue
from protos.generated import batcher_pb2, batcher_pb2_grpc
from services.batcher.config import BatcherConfig
from services.batcher.metrics import BatcherMetrics
from services.batcher.service import BatcherService
from services.forecast import Forecast
from services.forecasttable import ForecastTable
from services.policies.decide import arrange, rank_requests, select_candidates
from services.policies.memory import PolicyMemory
from services.policies.preset import choose, presets
from services.policies.snapshot import Candidates, RequestColumns, Snapshot
from services.runtime.codecs.arrange import (
    SentForecasts,
    decode_candidates,
    encode_candidates,
    encode_decision,
    encode_hello,
)
from services.scheduler.codec import decode_arrangement
from services.scheduler.core import events as ev
from services.scheduler.core.rounds import build_decision
from services.scheduler.links.arrangement_check import find_flaw
from tests.batcher.arranging import (
    ADD,
    FORECASTS,
    NAME,
    Answers,
    answer,
    apart,
    served,
    two_wait,
    waiting_request,
)
from tests.batcher.recorded_load import Recorder
from tests.examples import examples
from tests.observability.metrics.seen import uncatalogued, unseen
from tests.policies.made_snapshots import snapshots, table
from tests.reach import reaching, until

PRESETS = ("fcfs", "past-future", "alise", "vs", "so", "scls", "magnus")


class Recording(BatcherService):
    """A batcher that keeps the messages of each stream, and ends it after `most` answers if
    given."""

    def __init__(self, most: int = 10**9) -> None:
        super().__init__(BatcherConfig(), CollectorRegistry())
        self.streams: list[list[batcher_pb2.ArrangeMessage]] = []
        self.most = most

    async def Arrange(self, requests: Any, context: object) -> Answers:
        heard: list[batcher_pb2.ArrangeMessage] = []
        self.streams.append(heard)

        async def listened() -> AsyncIterator[batcher_pb2.ArrangeMessage]:
            async for message in requests:
                heard.append(message)
                yield message

        answers = 0
        async for arrangement in super().Arrange(listened(), context):
            yield arrangement
            answers += 1
            if answers == self.most:
                return

    def forecasts(self, stream: int) -> list[batcher_pb2.ForecastRow]:
        return [recorded for m in self.streams[stream] for recorded in m.candidates.forecasts]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
async def test_recorded_load_gives_same_decisions_in_batcher_and_in_process(preset: str) -> None:
    recorded = Recorder(choose(preset)).recorded
    preempted = any(isinstance(each, ev.Preempt) for _, _, actions in recorded for each in actions)
    assert preempted == (preset not in ("vs", "magnus"))  # evicted, or at the end of a slice
    servicer = Recording()
    async with apart(servicer, preset) as there:
        rounds = await there.same_as(recorded)
    assert rounds > 50
    assert there.by("batcher") == rounds
    assert len(servicer.streams) == 1


async def test_each_forecast_is_sent_once_and_again_when_renewed() -> None:
    recorded = Recorder(choose("past-future")).recorded
    servicer = Recording()
    async with apart(servicer, "past-future") as there:
        await there.same_as(recorded)
    forecasts = servicer.forecasts(0)
    assert max(Counter(tuple(recorded.points) for recorded in forecasts).values()) == 1
    shared = [recorded for recorded in forecasts if len(recorded.points) == 3]
    assert 1 < len(shared) <= sum(isinstance(event, ev.Refreshed) for event, _, _ in recorded) + 1
    assert len(forecasts) - len(shared) == sum(number % 3 != 0 for number in range(80))


async def test_new_stream_receives_all_live_forecasts() -> None:
    recorded = Recorder(choose("past-future")).recorded
    servicer = Recording(most=20)
    async with apart(servicer, "past-future") as there:
        for event, now, actions in recorded:
            if not there.arranger.connected:
                await until(lambda: there.arranger.connected)
            assert await there.step(event, now) == actions
    assert there.by("batcher") > 50
    assert len(servicer.streams) > 2
    for stream in range(len(servicer.streams)):
        known: set[int] = set()
        for message in servicer.streams[stream]:
            known |= {row.row for row in message.candidates.forecasts}
            asked = np.frombuffer(message.candidates.columns["forecast"], "<i8")
            assert set(asked.tolist()) <= known


async def test_batcher_arranges_as_policies_do() -> None:
    hello = encode_hello(choose("past-future"))
    (recorded,) = await answer(hello, waiting_request())
    rng = np.random.default_rng(3)
    (share,) = arrange(two_wait(), FORECASTS, choose("past-future"), rng).workers
    assert recorded.round == 3
    (decision,) = recorded.workers
    assert list(decision.run) == share.run.tolist() == [0, 1]
    assert (list(decision.limits), list(decision.victims)) == ([100, 100], share.victims.tolist())
    assert decision.peak_tokens == share.peak_tokens
    assert await answer(hello, waiting_request()) == [recorded]


async def test_batcher_times_rounds() -> None:
    registry = CollectorRegistry()

    async def sentence() -> AsyncIterator[batcher_pb2.ArrangeMessage]:
        yield encode_hello(choose("fcfs"))
        yield waiting_request()

    async with reaching("socket", NAME, ADD, served({}, registry)) as channel:
        stub = batcher_pb2_grpc.BatcherStub(channel)
        assert len([each async for each in stub.Arrange(sentence())]) == 1
    series = "foretoken_batcher_round_seconds_count"
    assert registry.get_sample_value(series, {"preset": "fcfs"}) == 1
    assert unseen(registry, catalogue.ALL) == []
    assert uncatalogued(registry, catalogue.ALL) == set()


def test_unknown_preset_names_do_not_grow_labels() -> None:
    registry = CollectorRegistry()
    metrics = BatcherMetrics(registry)
    for number in range(40):
        metrics.observe_round(f"preset {number}", 0.001)
    count = partial(registry.get_sample_value, "foretoken_batcher_round_seconds_count")
    assert (count({"preset": "preset 31"}), count({"preset": "preset 32"})) == (1, None)
    assert count({"preset": "other"}) == 8


def test_mirrored_forecast_row_is_bit_identical() -> None:
    forecast = Forecast((1.0, 2.0, 3.0), (1e-18, 0.3, 0.7), 9)
    home, mirror = table(forecast), ForecastTable()
    points, weights = home.points_of(0)
    assert (tuple(points), tuple(weights)) == (forecast.points, forecast.weights)
    mirror.put(0, points, weights)
    which, none, caps = np.zeros(99, np.int64), np.zeros(99, np.int64), np.full(99, 9)
    drawn = [t.sample(np.random.default_rng(1), which, none, caps) for t in (home, mirror)]
    assert drawn[0].tolist() == drawn[1].tolist()


def plain(asked: Candidates) -> list[Any]:
    """All values of the candidates, for comparison; a column's kind belongs to it."""
    columns = [asked.rows, asked.is_running, asked.key, asked.queue_key]
    columns += [getattr(asked.jobs, each.name) for each in fields(RequestColumns)]
    numbers = [(str(column.dtype), column.tolist()) for column in columns]
    return [asked.round, asked.now, asked.workers, numbers]


@pytest.mark.parametrize("preset", sorted(presets()))
@settings(max_examples=examples(60))
@given(snapshots(), st.integers(0, 2**32))
def test_any_board_round_trips_and_its_answer_is_valid(
    preset: str, snapshot: Snapshot, number: int
) -> None:
    chosen = choose(preset)
    home = select_candidates(
        snapshot, rank_requests(snapshot, chosen, PolicyMemory()), chosen, number
    )
    mirror = ForecastTable(1)
    message = encode_candidates(home, SentForecasts(snapshot.forecasts)).candidates
    there = decode_candidates(
        batcher_pb2.Candidates.FromString(message.SerializeToString()), mirror
    )
    assert plain(there) == plain(home)
    decisions = [
        arrange(asked, forecasts, chosen, np.random.default_rng(number))
        for asked, forecasts in ((home, snapshot.forecasts), (there, mirror))
    ]
    answers = [encode_decision(decision) for decision in decisions]
    assert answers[0] == answers[1]
    arranged = decode_arrangement(answers[1])
    assert find_flaw(home, arranged) == ""
    taken, made = build_decision(home, arranged).explanations, decisions[0].explanations
    for name in ("rows", "reasons", "first_values", "second_values"):
        assert getattr(taken, name).tolist() == getattr(made, name).tolist()

"""The separate batcher, on a real socket: the same decisions as at home, whatever becomes of it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from protos import batcher_pb2, batcher_pb2_grpc
from services.batcher.config import BatcherConfig
from services.batcher.service import BatcherService
from services.forecast import Forecast
from services.forecasttable import ForecastTable
from services.policies.decide import arrange, narrow, rank
from services.policies.memory import Memory
from services.policies.preset import Preset, choose, presets
from services.policies.snapshot import Contest, Jobs, Snapshot
from services.runtime.arrange_codec import (
    Telling,
    decode_contest,
    encode_contest,
    encode_decision,
    encode_hello,
)
from services.runtime.channel import connect
from services.runtime.tasks import background
from services.scheduler import events as ev
from services.scheduler.codec import decode_arrangement
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.rounds.arranger import Arranger
from services.scheduler.rounds.flaws import flaw
from services.scheduler.rounds.rounds import decision_of
from services.scheduler.state import SchedulerState
from tests.batcher.recorded_load import Recorder, Told
from tests.policies.made_snapshots import contest, jobs, seat, snapshots, table
from tests.reach import reaching, until

NAME = "foretoken.v1.Batcher"
ADD = batcher_pb2_grpc.add_BatcherServicer_to_server
PATIENT_S = 30.0  # a test machine may be busy
PRESETS = ("fcfs", "past-future", "alise", "vs", "so", "scls", "magnus")
Answers = AsyncIterator[batcher_pb2.Arrangement]


def served(config: Mapping[str, Any], registry: CollectorRegistry | None = None) -> BatcherService:
    return BatcherService(BatcherConfig(**config), registry or CollectorRegistry())


class Recording(BatcherService):
    """Keeps what each stream said; hangs up after `most` answers, if so told."""

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
        async for answer in super().Arrange(listened(), context):
            yield answer
            answers += 1
            if answers == self.most:
                return

    def forecasts(self, stream: int) -> list[batcher_pb2.ForecastRow]:
        return [told for m in self.streams[stream] for told in m.contest.forecasts]


class Apart:
    """A state whose rounds an Arranger has arranged, and that is told a recorded load."""

    def __init__(self, channel: aio.Channel, preset: Preset, timeout_s: float = PATIENT_S):
        self.state = SchedulerState(preset, apart=True)
        self.registry = CollectorRegistry()
        self.arranged: asyncio.Queue[ev.Arranged] = asyncio.Queue()
        self.arranger = Arranger(
            channel,
            preset,
            self.state.ledger.board.forecasts,
            timeout_s,
            SchedulerMetrics(self.registry),
            self.arranged.put_nowait,
        )

    def by(self, who: str) -> int:
        """Rounds that were arranged by this one, or at home because of this."""
        series = "foretoken_scheduler_rounds_arranged_total"
        return int(self.registry.get_sample_value(series, {"by": who}) or 0)

    async def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        actions = self.state.step(event, now)
        asked = [action for action in actions if isinstance(action, ev.AskArrange)]
        if not asked:
            return actions
        assert self.state.rounds.contest is not None
        self.arranger.ask(self.state.rounds.contest)
        async with asyncio.timeout(PATIENT_S):
            arranged = await self.arranged.get()
        rest = [action for action in actions if not isinstance(action, ev.AskArrange)]
        return rest + self.state.step(arranged, now)

    async def same_as(self, told: list[Told]) -> int:
        """Whether all is done as it was there; how many rounds were asked about."""
        for event, now, actions in told:
            assert await self.step(event, now) == actions
        return sum(self.by(who) for who in ("batcher", "late", "gone", "wrong"))


@asynccontextmanager
async def apart(
    servicer: object, preset: str, timeout_s: float = PATIENT_S
) -> AsyncIterator[Apart]:
    async with reaching("socket", NAME, ADD, servicer) as channel:
        made = Apart(channel, choose(preset), timeout_s)
        async with background(made.arranger.run()):
            await until(lambda: made.arranger.connected)
            yield made


@pytest.mark.parametrize("preset", PRESETS)
async def test_a_recorded_load_is_decided_the_same_apart_and_at_home(preset: str) -> None:
    told = Recorder(choose(preset)).told
    preempted = any(isinstance(each, ev.Preempt) for _, _, actions in told for each in actions)
    assert preempted == (preset not in ("vs", "magnus"))  # memory ran out, or a turn was over
    servicer = Recording()
    async with apart(servicer, preset) as there:
        rounds = await there.same_as(told)
    assert rounds > 50
    assert there.by("batcher") == rounds
    assert len(servicer.streams) == 1


async def test_each_forecast_crosses_once_and_a_renewed_one_again() -> None:
    told = Recorder(choose("past-future")).told
    servicer = Recording()
    async with apart(servicer, "past-future") as there:
        await there.same_as(told)
    forecasts = servicer.forecasts(0)
    assert max(Counter(tuple(told.points) for told in forecasts).values()) == 1
    shared = [told for told in forecasts if len(told.points) == 3]
    assert 1 < len(shared) <= sum(isinstance(event, ev.Refreshed) for event, _, _ in told) + 1
    assert len(forecasts) - len(shared) == sum(number % 3 != 0 for number in range(80))


async def test_who_is_connected_anew_is_told_all_that_matters_again() -> None:
    told = Recorder(choose("past-future")).told
    servicer = Recording(most=20)
    async with apart(servicer, "past-future") as there:
        for event, now, actions in told:
            if not there.arranger.connected:
                await until(lambda: there.arranger.connected)
            assert await there.step(event, now) == actions
    assert there.by("batcher") > 50
    assert len(servicer.streams) > 2
    for stream in range(len(servicer.streams)):
        known: set[int] = set()
        for message in servicer.streams[stream]:
            known |= {row.row for row in message.contest.forecasts}
            asked = np.frombuffer(message.contest.columns["forecast"], "<i8")
            assert set(asked.tolist()) <= known


# A batcher that fails: the load is served all the same


class Silent(batcher_pb2_grpc.BatcherServicer):
    """Takes what it is told, and sleeps."""

    def __init__(self) -> None:
        self.streams = 0

    async def Arrange(self, requests: Any, context: object) -> Answers:
        self.streams += 1
        async for message in requests:
            if message.HasField("contest"):
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


def first_run(answer: batcher_pb2.Arrangement) -> batcher_pb2.Portion:
    """A portion in which somebody runs; where there is none, nobody's row does."""
    found = next((each for each in answer.portions if each.run), None)
    if found is None:
        no_such_row(answer)
    return found or answer.portions[0]


def no_such_row(answer: batcher_pb2.Arrangement) -> None:
    answer.portions[0].run.append(4_000_000)
    answer.portions[0].limits.append(10)


def a_row_of_nobody(answer: batcher_pb2.Arrangement) -> None:
    answer.portions[0].run.append(255)
    answer.portions[0].limits.append(10)


def too_few_limits(answer: batcher_pb2.Arrangement) -> None:
    portion = first_run(answer)
    portion.limits.append(9)


def limits_without_bound(answer: batcher_pb2.Arrangement) -> None:
    portion = first_run(answer)
    portion.limits[0] = 2**64 - 1


def limits_of_nothing(answer: batcher_pb2.Arrangement) -> None:
    portion = first_run(answer)
    portion.limits[0] = 0


def twice(answer: batcher_pb2.Arrangement) -> None:
    portion = first_run(answer)
    portion.run.append(portion.run[0])
    portion.limits.append(portion.limits[0])


def pauses_all(answer: batcher_pb2.Arrangement) -> None:
    for portion in answer.portions:
        portion.pause.extend(portion.run or [255])


def strange_victims(answer: batcher_pb2.Arrangement) -> None:
    answer.portions[0].victims.append(4_000_000)


def elsewhere(answer: batcher_pb2.Arrangement) -> None:
    for portion in answer.portions:
        portion.worker += 1


def no_portions(answer: batcher_pb2.Arrangement) -> None:
    del answer.portions[:]


def never_again(answer: batcher_pb2.Arrangement) -> None:
    answer.not_before_s = float("inf")


def no_time(answer: batcher_pb2.Arrangement) -> None:
    answer.next_s = float("nan")


def time_gone_by(answer: batcher_pb2.Arrangement) -> None:
    answer.next_s = -1.0


SPOILS = (
    no_such_row, a_row_of_nobody, too_few_limits, limits_without_bound, limits_of_nothing, twice,
    pauses_all, strange_victims, elsewhere, no_portions, never_again, no_time, time_gone_by,
)  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
async def test_an_answer_that_cannot_be_is_not_carried_out(
    spoil: Callable[[batcher_pb2.Arrangement], None],
) -> None:
    told = Recorder(choose("alise"), requests=12).told
    async with apart(Wrong(spoil), "alise") as there:
        rounds = await there.same_as(told)
    assert there.by("wrong") >= 1
    assert there.by("batcher") == 0
    assert there.by("wrong") + there.by("gone") == rounds


async def test_nobody_admitted_by_a_batcher_is_admitted_at_home() -> None:
    def holds_back(answer: batcher_pb2.Arrangement) -> None:
        for portion in answer.portions:
            del portion.run[:], portion.limits[:], portion.victims[:], portion.pause[:]

    told = Recorder(choose("fcfs"), requests=12).told
    async with apart(Wrong(holds_back), "fcfs") as there:
        first = next(i for i, (_, _, actions) in enumerate(told) if has_place(actions))
        await there.same_as(told[: first + 1])
    assert there.by("wrong") == 1


def has_place(actions: list[ev.Action]) -> bool:
    return any(isinstance(action, ev.Place) for action in actions)


async def test_an_answer_to_another_round_is_none() -> None:
    def another(answer: batcher_pb2.Arrangement) -> None:
        answer.round += 1

    told = Recorder(choose("fcfs"), requests=12).told
    async with apart(Wrong(another), "fcfs", timeout_s=0.05) as there:
        rounds = await there.same_as(told)
    assert there.by("batcher") == 0
    assert there.by("late") >= 1
    assert there.by("late") + there.by("gone") == rounds


async def test_one_that_is_late_is_hung_up_on_and_asked_again_after_a_while() -> None:
    told = Recorder(choose("fcfs"), requests=12).told
    servicer = Silent()
    async with apart(servicer, "fcfs", timeout_s=0.02) as there:
        rounds = await there.same_as(told)
        assert there.by("late") + there.by("gone") == rounds
        assert there.by("late") >= 1
        await until(lambda: servicer.streams > 1)


async def test_one_that_refuses_the_preset_ends_nothing() -> None:
    told = Recorder(choose("fcfs"), requests=12).told
    async with reaching("socket", NAME, ADD, Refusing()) as channel:
        there = Apart(channel, choose("fcfs"))
        async with background(there.arranger.run()):
            rounds = await there.same_as(told)
    assert there.by("gone") == rounds > 0


async def test_one_that_is_not_there_is_not_waited_for() -> None:
    told = Recorder(choose("fcfs"), requests=12).told
    channel = connect("unix:/nobody")
    there = Apart(channel, choose("fcfs"))
    async with background(there.arranger.run()):
        rounds = await there.same_as(told)
    assert there.by("gone") == rounds > 0
    await channel.close()


async def test_a_round_that_is_out_when_the_stream_ends_is_made_at_home() -> None:
    """The batcher dies with the question in hand."""

    class Dying(batcher_pb2_grpc.BatcherServicer):
        async def Arrange(self, requests: Any, context: Any) -> Answers:
            async for message in requests:
                if message.HasField("contest"):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            yield batcher_pb2.Arrangement()

    told = Recorder(choose("fcfs"), requests=12).told
    async with apart(Dying(), "fcfs") as there:
        rounds = await there.same_as(told)
    assert there.by("gone") == rounds


async def test_ending_the_arranger_leaves_no_timer_and_dispatches_nothing() -> None:
    async with apart(Silent(), "fcfs", timeout_s=0.05) as there:
        there.arranger.ask(two_wait())
    await asyncio.sleep(0.1)
    assert there.arranged.empty()


# What the service says to what it can't understand


def two_wait() -> Contest:
    made = jobs(2, forecast=[0, 1])
    return contest(made, [False, False], seat(), number=3)


FORECASTS = table(Forecast((5.0, 80.0), (0.5, 0.5), 100), Forecast((1.0, 9.0), (0.9, 0.1), 100))


def asked() -> batcher_pb2.ArrangeMessage:
    return encode_contest(two_wait(), Telling(FORECASTS))


async def answer(
    *messages: batcher_pb2.ArrangeMessage, **config: int
) -> list[batcher_pb2.Arrangement]:
    async def said() -> AsyncIterator[batcher_pb2.ArrangeMessage]:
        for message in messages:
            yield message

    async with reaching("socket", NAME, ADD, served(config)) as channel:
        call = batcher_pb2_grpc.BatcherStub(channel).Arrange(said())
        return [each async for each in call]


async def test_a_contest_is_arranged_as_the_functions_say() -> None:
    hello = encode_hello(choose("past-future"))
    (told,) = await answer(hello, asked())
    rng = np.random.default_rng(3)
    (share,) = arrange(two_wait(), FORECASTS, choose("past-future"), rng).shares
    assert told.round == 3
    (portion,) = told.portions
    assert list(portion.run) == share.run.tolist() == [0, 1]
    assert (list(portion.limits), list(portion.victims)) == ([100, 100], share.victims.tolist())
    assert portion.peak_tokens == share.peak_tokens
    assert await answer(hello, asked()) == [told]


def floats(*values: float) -> bytes:
    return np.array(values, "<f8").tobytes()


def ints(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def spoilt(**fields: Any) -> batcher_pb2.ArrangeMessage:
    message = asked()
    for name, value in fields.items():
        setattr(message.contest, name, value)
    return message


def with_column(name: str, value: bytes | None) -> batcher_pb2.ArrangeMessage:
    message = asked()
    if value is None:
        del message.contest.columns[name]
    else:
        message.contest.columns[name] = value
    return message


def with_seat(**fields: Any) -> batcher_pb2.ArrangeMessage:
    message = asked()
    for name, value in fields.items():
        setattr(message.contest.seats[0], name, value)
    return message


def with_base_s(value: float) -> batcher_pb2.ArrangeMessage:
    message = asked()
    message.contest.seats[0].cost.base_s = value
    return message


def with_second_seat() -> batcher_pb2.ArrangeMessage:
    message = asked()
    message.contest.seats.append(message.contest.seats[0])
    return message


def with_forecast(
    row: int, points: list[float], weights: list[float]
) -> batcher_pb2.ArrangeMessage:
    message = asked()
    told = batcher_pb2.ForecastRow(row=row, points=points, weights=weights)
    message.contest.forecasts.append(told)
    return message


NAN = float("nan")


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (spoilt(now=NAN), "now: must be finite"),
        (spoilt(rows=b"123"), "rows: is no array of 8-byte elements"),
        (spoilt(rows=ints(0, -1)), "rows: must lie in [0, "),
        (spoilt(rows=ints(0, 2**32)), "rows: must lie in [0, "),
        (spoilt(rows=ints(4, 4)), "rows: must differ"),
        (spoilt(rows=ints(*range(9))), "rows: at most 8 a round, got 9"),
        (spoilt(runs=b"\0"), "runs: must have 2 rows, got 1"),
        (spoilt(key=floats(1)), "key: must have 2 rows, got 1"),
        (spoilt(key=b"123"), "key: is no array of 8-byte elements"),
        (spoilt(key=floats(1, NAN)), "key: must be numbers"),
        (spoilt(line=floats(1)), "line: must have 2 rows, got 1"),
        (spoilt(line=floats(NAN, 1)), "line: must be numbers"),
        (with_column("prompt", None), "columns: prompt missing"),
        (with_column("colour", ints(1, 2)), "columns: colour not known here"),
        (with_column("prompt", ints(1)), "columns['prompt']: must have 2 rows, got 1"),
        (with_column("prompt", b"1"), "columns['prompt']: is no array of 8-byte elements"),
        (with_column("prompt", ints(1, -1)), "columns['prompt']: must lie in [0, "),
        (with_column("cap", ints(1, 2**40)), "columns['cap']: must lie in [0, "),
        (with_column("home", ints(-2, 1)), "columns['home']: must lie in [-1, "),
        (with_column("total", floats(1, NAN)), "columns['total']: must be numbers"),
        (with_column("forecast", ints(0, 2)), "columns['forecast']: names a row that was never"),
        (with_column("forecast", ints(0, 99)), "columns['forecast']: names a row that was never"),
        (with_seat(block_tokens=0), "seats: block_tokens must be positive"),
        (with_seat(kv_tokens=2**60), "seats: kv_tokens must be at most"),
        (with_second_seat(), "seats: two have one number"),
        (with_base_s(float("inf")), "seats: cost must be finite"),
        (with_forecast(2, [], []), "forecasts: row 2 can't be"),
        (with_forecast(2, [2, 1], [0.5, 0.5]), "forecasts: row 2 can't be"),
        (with_forecast(2, [1, 2], [1]), "forecasts: row 2 can't be"),
        (with_forecast(2, [1, 2], [0.5, 0.4]), "forecasts: row 2 can't be"),
        (with_forecast(2, [1, 2], [1.0, 0.0]), "forecasts: row 2 can't be"),
        (with_forecast(2, [-1, 2], [0.5, 0.5]), "forecasts: row 2 can't be"),
        (with_forecast(2, [NAN], [1]), "forecasts: row 2 can't be"),
        (with_forecast(2, [1], [NAN]), "forecasts: row 2 can't be"),
        (with_forecast(2, [1, 2.0**25], [0.5, 0.5]), "forecasts: row 2 can't be"),
        (with_forecast(2**31, [1, 2], [0.5, 0.5]), "forecasts: row 2147483648 can't be"),
    ],
)
async def test_a_contest_that_cannot_be_is_refused_by_field(
    message: batcher_pb2.ArrangeMessage, sentence: str
) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await answer(encode_hello(choose("fcfs")), message, rows_max=8)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in (caught.value.details() or "")


def hello(**change: Any) -> batcher_pb2.ArrangeMessage:
    message = encode_hello(choose("past-future"))
    message.hello.choices.update(change.get("choices", {}))
    message.hello.params.update(change.get("params", {}))
    return message


def incomplete() -> batcher_pb2.ArrangeMessage:
    message = hello()
    del message.hello.choices["order"]
    return message


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (asked(), "hello: the first message of Arrange must be a hello"),
        (incomplete(), "hello.choices: order missing"),
        (hello(choices={"form": "fifo"}), "hello: unknown preset.form 'fifo'"),
        (hello(params={"watermark": 1.0}), "hello: preset has no parameter 'watermark'"),
        (hello(params={"reserved": NAN}), "hello: preset.reserved must lie in [0, 1]"),
    ],
)
async def test_a_hello_that_cannot_be_is_refused(
    message: batcher_pb2.ArrangeMessage, sentence: str
) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await answer(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in (caught.value.details() or "")


async def test_too_many_workers_or_forecasts_are_refused() -> None:
    start = encode_hello(choose("fcfs"))
    for message, sentence, config in (
        (with_second_seat(), "seats: at most 1 a round, got 2", {"workers_max": 1}),
        (asked(), "rows: at most 1 a round, got 2", {"rows_max": 1}),
        (with_forecast(2, [1], [1]), "forecasts: at most 2 a round, got 3", {"rows_max": 2}),
    ):
        with pytest.raises(aio.AioRpcError) as caught:
            await answer(start, message, **config)
        assert sentence in (caught.value.details() or "")


async def test_rounds_are_timed() -> None:
    registry = CollectorRegistry()

    async def said() -> AsyncIterator[batcher_pb2.ArrangeMessage]:
        yield encode_hello(choose("fcfs"))
        yield asked()

    async with reaching("socket", NAME, ADD, served({}, registry)) as channel:
        stub = batcher_pb2_grpc.BatcherStub(channel)
        assert len([each async for each in stub.Arrange(said())]) == 1
    series = "foretoken_batcher_round_seconds_count"
    assert registry.get_sample_value(series, {"preset": "fcfs"}) == 1


def test_a_mirrored_row_is_the_same_bits_however_small_a_weight() -> None:
    forecast = Forecast((1.0, 2.0, 3.0), (1e-18, 0.3, 0.7), 9)
    home, mirror = table(forecast), ForecastTable()
    points, weights = home.points_of(0)
    assert (tuple(points), tuple(weights)) == (forecast.points, forecast.weights)
    mirror.put(0, points, weights)
    which, none, caps = np.zeros(99, np.int64), np.zeros(99, np.int64), np.full(99, 9)
    drawn = [t.sample(np.random.default_rng(1), which, none, caps) for t in (home, mirror)]
    assert drawn[0].tolist() == drawn[1].tolist()


def plain(asked: Contest) -> list[Any]:
    """All of it, to be compared; a column's kind belongs to it."""
    columns = [asked.rows, asked.runs, asked.key, asked.line]
    columns += [getattr(asked.jobs, each.name) for each in fields(Jobs)]
    numbers = [(str(column.dtype), column.tolist()) for column in columns]
    return [asked.round, asked.now, asked.workers, numbers]


@pytest.mark.parametrize("preset", sorted(presets()))
@settings(max_examples=60)
@given(snapshots(), st.integers(0, 2**32))
def test_whatever_the_board_it_crosses_as_it_is_and_the_answer_is_taken(
    preset: str, snapshot: Snapshot, number: int
) -> None:
    chosen = choose(preset)
    home = narrow(snapshot, rank(snapshot, chosen, Memory()), chosen, number)
    mirror = ForecastTable(1)
    message = encode_contest(home, Telling(snapshot.forecasts)).contest
    there = decode_contest(batcher_pb2.Contest.FromString(message.SerializeToString()), mirror)
    assert plain(there) == plain(home)
    decisions = [
        arrange(asked, forecasts, chosen, np.random.default_rng(number))
        for asked, forecasts in ((home, snapshot.forecasts), (there, mirror))
    ]
    answers = [encode_decision(decision) for decision in decisions]
    assert answers[0] == answers[1]
    arranged = decode_arrangement(answers[1])
    assert flaw(home, arranged) == ""
    taken, made = decision_of(home, arranged).why, decisions[0].why
    for name in ("rows", "reasons", "a", "b"):
        assert getattr(taken, name).tolist() == getattr(made, name).tolist()

"""Reading in the background: what it may cost, what is read first, and who is told."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import predictor_pb2
from services.core import FinishReason, Outcome
from services.forecast import Forecast, certain
from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.guard import LEAST, Guarded
from services.predictor.blend.members import FittedMember
from services.predictor.cascade.budget import Budget
from services.predictor.cascade.cascade import Asked, Cascade, Read, Reading
from services.predictor.cascade.desk import Desk
from services.predictor.cascade.feed import Feed
from services.predictor.cascade.newest import Newest
from services.predictor.cascade.pending import Pending
from services.predictor.cascade.reading import BATCH, Eyes
from services.predictor.cascade.remembered import Remembered, Seen
from services.predictor.encoder.encoder import Encoder
from services.predictor.encoder.extract import Extractor
from services.predictor.encoder.packing import pack
from services.predictor.interface import Example, Features, Options, Prompt, Query
from services.predictor.models.fitting import Fit
from services.predictor.models.history import HistoryPredictor
from services.predictor.models.ridge import fit_ridge, fit_words
from services.predictor.predictors import PREDICTORS
from tests.predictor.encoder.small_encoders import bert, saved
from tests.predictor.predictor_serving import HashEncoder, asked, ended, mean, predicting
from tests.reach import until

FEATURES = Extractor(HashEncoder()).extract([Prompt("be brief", "hello", 5)])[0]
PACKED = pack(FEATURES)

# The budget


def test_a_tenth_of_a_core_by_hand() -> None:
    budget = Budget(share=0.1, saved_s=1.0, now_s=100.0)
    assert budget.wait_s(100.0) == 0
    budget.spend(0.75, 101.0)  # 1 + 0.1 - 0.75
    assert budget.wait_s(101.0) == 0
    budget.spend(0.6, 102.0)  # 0.35 + 0.1 - 0.6
    assert budget.wait_s(102.0) == pytest.approx(1.5)
    assert budget.wait_s(103.0) == pytest.approx(0.5)
    assert budget.wait_s(104.0) == 0
    assert budget.spent_s == pytest.approx(1.35)


def test_no_more_is_saved_than_may_be() -> None:
    budget = Budget(share=0.5, saved_s=0.2, now_s=0.0)
    budget.spend(0.0, 1_000.0)
    budget.spend(0.4, 1_000.0)
    assert budget.wait_s(1_000.0) == pytest.approx(0.4)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1)), max_size=50))
def test_a_whole_core_is_never_waited_for(work: list[tuple[float, float]]) -> None:
    budget, now_s = Budget(share=1.0, saved_s=0.01, now_s=0.0), 0.0
    for took_s, share in work:
        now_s += took_s
        budget.spend(took_s * share, now_s)
        assert budget.wait_s(now_s) == pytest.approx(0, abs=1e-9)


@given(st.floats(0.01, 1), st.lists(st.floats(0, 2), min_size=1, max_size=50))
def test_whoever_waits_spends_no_more_than_the_share(share: float, costs: list[float]) -> None:
    """Each is run as soon as it may be, on a whole core of its own."""
    budget, now_s = Budget(share, saved_s=1.0, now_s=0.0), 0.0
    for cost in costs:
        now_s += budget.wait_s(now_s) + cost
        budget.spend(cost, now_s)
    now_s += budget.wait_s(now_s)
    assert budget.spent_s <= 1.0 + share * now_s + 1e-6


# What is read first


def test_the_newest_goes_first_and_the_oldest_goes_unread() -> None:
    unread: Newest[str] = Newest(3)
    for name in "abcd":
        unread.put(name, name.upper())
    assert (len(unread), unread.dropped) == (3, 1)
    assert unread.pop("c") == "C" and unread.pop("a") is None
    unread.put("b", "again")
    assert unread.take(1) == ["again"]
    assert unread.take(9) == ["D"] and unread.take(9) == []


def test_what_was_asked_longest_ago_is_forgotten() -> None:
    seen, remembered = Seen(certain(7, "model"), b"packed", 1), Remembered(2)
    a, b, c = (Query("demo", "", 1, 9, prompt=Prompt("", text, 1)) for text in "abc")
    remembered.put(a, seen)
    remembered.put(b, seen)
    assert remembered.get(replace(a, max_tokens=50)) is seen  # whatever its cap
    remembered.put(c, seen)
    assert [remembered.get(query) for query in (a, b, c)] == [seen, None, seen]
    remembered.put(replace(b, prompt=None), seen)
    assert remembered.get(replace(b, prompt=None)) is None
    others = (replace(a, model="other"), replace(a, application="chat"))
    assert [remembered.get(other) for other in others] == [None, None]


class Model:
    """Says 9 tokens of what is read, and 30 by words where it has learnt those."""

    version = 0

    def __init__(self, edition: int = 1, words: bool = False):
        self.edition, self.words = edition, words

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        return [certain(9, "model") for _ in batch]

    def by_words(self, batch: Sequence[Query]) -> list[Forecast | None]:
        return [certain(30, "words") if self.words else None for _ in batch]

    def learn(self, examples: Sequence[Example]) -> int:
        return len(examples)


class Machine:
    """A cascade, and what it told."""

    def __init__(self, model: Model | None = None, unread_max: int = 100):
        self.model = model or Model()
        self.guarded = Guarded(self.model, HistoryPredictor())
        self.pending = Pending(100)
        self.told: list[Read] = []
        self.cascade = Cascade(
            self.guarded, self.pending, Remembered(50), unread_max, True, False, self.told.append
        )

    def ask(self, name: str, text: str | None = None) -> tuple[str, str]:
        prompt = Prompt("", text or name, 3)
        query = Query("demo", "", 3, 99, prompt=prompt)
        [answer] = self.cascade.answer([Asked(name, query, 1.0)])
        return answer.stage, answer.made.given.source

    def end(self, name: str, reason: FinishReason = FinishReason.STOP) -> None:
        outcome = Outcome(name, "demo", "", 3, 7, 99, reason, 1.0, 0)
        self.cascade.end(outcome, self.pending.pop(name), 5.0)

    def take(self, most: int = 8) -> list[Asked]:
        return self.cascade.take(most)

    def read(self, batch: Sequence[Asked]) -> Read:
        said = [Reading(FEATURES, PACKED, None if a.late else certain(9, "model")) for a in batch]
        self.cascade.read(batch, said)
        return self.told[-1]


def names(batch: Sequence[Asked]) -> list[str]:
    return [asked.request_id for asked in batch]


def test_answered_at_once_by_history_then_improved_once() -> None:
    machine = Machine()
    assert machine.ask("a") == ("plain", "history")
    read = machine.read(machine.take())
    assert read.better == (("a", certain(9, "model")),) and read.since_s == (1.0,)
    waiting = machine.pending.pop("a")
    assert waiting and waiting.packed == PACKED and waiting.made.by_model == certain(9, "model")
    assert machine.take() == []


def test_words_answer_before_the_encoder_has_read() -> None:
    machine = Machine(Model(words=True))
    assert machine.ask("a") == ("words", "words")
    assert [f.source for _, f in machine.read(machine.take()).better] == ["model"]


def test_the_same_prompt_again_is_answered_at_once_and_not_read() -> None:
    machine = Machine()
    machine.ask("a", "hello")
    machine.read(machine.take())
    assert machine.ask("b", "hello") == ("remembered", "model")
    assert machine.take() == []
    waiting = machine.pending.pop("b")
    assert waiting and waiting.packed == PACKED


def test_what_other_models_said_is_given_and_read_anew() -> None:
    machine = Machine()
    machine.ask("a", "hello")
    machine.read(machine.take())
    machine.model.edition = 2
    assert machine.ask("b", "hello") == ("remembered", "model")
    assert names(machine.take()) == ["b"]


def test_a_request_asked_again_is_read_once() -> None:
    machine = Machine()
    machine.ask("a")
    machine.ask("a")
    batch = machine.take()
    machine.ask("a")
    assert names(batch) == ["a"] and machine.take() == []
    machine.ask("b")
    machine.read(machine.take())
    machine.model.edition = 2
    machine.ask("b")
    assert machine.take() == []


def test_who_ended_is_told_nothing_and_read_last() -> None:
    machine = Machine()
    for name in "abcd":
        machine.ask(name)
    machine.end("a")
    machine.end("c")
    machine.end("d", FinishReason.CANCELLED)
    assert names(machine.take()) == ["b"]
    batch = machine.take()
    assert names(batch) == ["c", "a"]
    read = machine.read(batch)
    assert read.better == () and (read.waiting, read.ended) == (0, 2)
    assert [(late.outcome.request_id, packed) for late, packed in read.late] == [
        ("c", PACKED),
        ("a", PACKED),
    ]


def test_who_ends_while_it_is_read_is_learnt_from_all_the_same() -> None:
    machine = Machine()
    machine.ask("a")
    machine.ask("b")
    batch = machine.take()
    machine.end("a")
    machine.end("b", FinishReason.CANCELLED)
    read = machine.read(batch)
    assert read.better == ()
    assert [late.outcome.request_id for late, _ in read.late] == ["a"]


def test_who_fell_out_is_not_read() -> None:
    machine = Machine(unread_max=2)
    for name in "abc":
        machine.ask(name)
    assert names(machine.take()) == ["c", "b"] and machine.cascade.unread.dropped == 1


def test_a_model_set_aside_is_read_and_judged_and_not_heard() -> None:
    machine = Machine()
    machine.ask("a")
    assert machine.guarded.compare([1.0] * LEAST)
    assert machine.read(machine.take()).better == ()
    waiting = machine.pending.pop("a")
    assert waiting and waiting.made.by_model == certain(9, "model")
    assert waiting.made.given.source == "history"


def test_what_could_not_be_read_is_counted_and_keeps_its_answer() -> None:
    machine = Machine()
    machine.ask("a")
    machine.cascade.read(machine.take(), [Reading(missed="failed")])
    assert (machine.told[-1].better, machine.told[-1].missed) == ((), ("failed",))
    waiting = machine.pending.pop("a")
    assert waiting and waiting.made.given.source == "history"


# The thread


class Choosy:
    """Extracts all but prompts that say they are bad."""

    def extract(self, texts: Sequence[Prompt]) -> list[Features]:
        if any("bad" in prompt.user_input for prompt in texts):
            raise ValueError("no such prompt")
        return [FEATURES for _ in texts]


def test_one_bad_prompt_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    eyes = Eyes(Choosy(), lambda queries: [certain(9, "model") for _ in queries])
    batch = [
        Asked(text, Query("demo", "", 1, 9, prompt=Prompt("", text, 1)), 0.0)
        for text in ("good", "bad", "fine", "bad too")
    ]
    readings = eyes.read(batch)
    assert [r.missed for r in readings] == ["", "failed", "", "failed"]
    assert [r.packed for r in readings] == [PACKED, b"", PACKED, b""]
    assert [bool(r.by_model) for r in readings] == [True, False, True, False]
    assert sum("said once" in r.getMessage() for r in caplog.records) == 1


async def test_turns_come_one_by_one_off_the_loop_and_are_paid() -> None:
    desk = Desk(share=1.0, saved_s=1.0)
    seen: list[str] = []

    def work(name: str) -> str:
        seen.append(name)
        return threading.current_thread().name

    threads = await asyncio.gather(*(desk.run(partial(work, n)) for n in "abc"))
    with pytest.raises(ZeroDivisionError):
        await desk.run(lambda: 1 // 0)
    assert await desk.run(lambda: 5) == 5
    desk.close()
    assert seen == ["a", "b", "c"]
    assert {name.rpartition("_")[0] for name in threads} == {"foretoken-read"}
    assert desk.budget.spent_s > 0
    assert not [t for t in threading.enumerate() if t.name.startswith("foretoken-read")]


# Who is told


async def test_every_listener_is_told_and_a_slow_one_loses_the_oldest() -> None:
    feed: Feed[int] = Feed(2)
    feed.push(0)
    one, other = feed.listen(), feed.listen()
    first = [asyncio.ensure_future(anext(listener)) for listener in (one, other)]
    await asyncio.sleep(0)
    assert len(feed) == 2
    feed.push(1)
    assert await asyncio.gather(*first) == [1, 1]
    for number in (2, 3, 4):
        feed.push(number)
    assert [await anext(one), await anext(one)] == [3, 4]
    assert feed.dropped == 2
    await one.aclose()
    assert len(feed) == 1


# Whole


def fitted(encoder: Encoder, words: Fit | None) -> ContentPredictor:
    """Has learnt that poems are long and sums short."""
    predictor = ContentPredictor("ridge", {"ridge": FittedMember(fit_ridge)}, Options(), words)
    prompts = [Prompt("", f"{what} the sea {n}", 5) for n in range(40) for what in ABOUT]
    predictor.learn(
        [
            Example(Query("demo", "", 5, 1_000, features), ABOUT[prompt.user_input.split()[0]])
            for prompt, features in zip(prompts, Extractor(encoder).extract(prompts), strict=True)
        ]
    )
    predictor.fit()
    return predictor


ABOUT = {"write": 400, "sum": 4}


@pytest.mark.parametrize(("words", "source"), [(None, "history"), (fit_words, "words")])
async def test_a_better_forecast_comes_over_the_socket(
    words: Fit | None, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder.load(str(saved(tmp_path, bert())))
    monkeypatch.setitem(PREDICTORS, "ridge", lambda _: fitted(encoder, words))
    async with predicting("ridge", encoder=encoder, way="socket") as running:
        (at_once,) = await running.foretell(asked("", "write the list"))
        assert at_once.source == source
        long, short = await running.improved(asked("a", "write a poem"), asked("b", "sum the sea"))
        assert (long.source, short.source, long.shared_key) == ("ridge", "ridge", "")
        assert mean(short) < mean(long)
        (known,) = await running.foretell(asked("c", "write a poem"))
        assert known == long
        assert running.value("answered_total", stage="remembered") == 1
        assert running.value("reading_lag_seconds_count") == running.value("improved_total") == 2


class Stuck(HashEncoder):
    """Encodes when it is let."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.began = threading.Event()
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.began.set()
        assert self.go.wait(20)
        self.texts += texts
        return super().encode(texts)


async def test_all_is_answered_while_the_encoder_is_busy_and_the_newest_is_read_first() -> None:
    encoder = Stuck()
    async with predicting("retrieval", encoder=encoder, unread_max=BATCH) as running:
        encoder.texts.clear()
        encoder.go.clear()
        encoder.began.clear()
        try:
            await running.foretell(asked("first", "first"))
            await asyncio.to_thread(encoder.began.wait, 20)
            for number in range(BATCH + 2):
                (forecast,) = await running.foretell(asked(f"r{number}", f"prompt {number}"))
                assert forecast.source == "history"
            await running.observe(ended("r9", 7, reason=4))
        finally:
            encoder.go.set()
        await running.read(BATCH)
        await until(lambda: running.value("unread_dropped") == 2)
    read = [text for text in encoder.texts if text.startswith("prompt")]
    assert read == [f"prompt {n}" for n in range(8, 1, -1)]


@pytest.mark.parametrize("model", ["history", "max"])
async def test_who_reads_nothing_tells_nothing(model: str) -> None:
    async with predicting(model) as running:
        stream = running.stub.Improve(predictor_pb2.ImproveRequest())
        listening = asyncio.ensure_future(anext(aiter(stream)))
        await until(lambda: running.service.listeners == 1)
        await running.foretell(asked("a", "hello"))
        await running.observe(ended("a", 5))
        assert not listening.done()
        assert running.value("read_total", of="waiting") == 0
        assert running.value("answered_total", stage="plain") == 1
        listening.cancel()
        stream.cancel()

"""The cascade as transcripts: who is answered by what, what is read first, and who is told."""

from dataclasses import replace

from services.core import FinishReason
from services.forecast import certain
from services.predictor.blend.guard import LEAST
from services.predictor.interface import Prompt, Query
from services.predictor.serving.forecast_cache import Remembered, Seen
from services.predictor.serving.forecaster import Reading
from services.predictor.serving.newest_first_queue import Newest
from tests.predictor.serving_fixtures import PACKED, Machine, Model, names


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

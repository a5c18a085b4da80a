"""Transcripts of the two-stage forecaster: stages, reading order and improvements."""

from dataclasses import replace

from services.core import FinishReason
from services.forecast import certain
from services.predictor.blend.guard import MIN_OUTCOMES
from services.predictor.interface import Prompt, Query
from services.predictor.serving.forecast_cache import CachedForecast, ForecastCache
from services.predictor.serving.forecaster import PromptReading
from services.predictor.serving.newest_first_queue import NewestFirstQueue
from tests.predictor.serving_fixtures import PACKED, ForecasterHarness, Model, names


def test_queue_pops_newest_and_evicts_oldest() -> None:
    unread: NewestFirstQueue[str] = NewestFirstQueue(3)
    for name in "abcd":
        unread.put(name, name.upper())
    assert (len(unread), unread.dropped) == (3, 1)
    assert unread.pop("c") == "C" and unread.pop("a") is None
    unread.put("b", "again")
    assert unread.pop_newest(1) == ["again"]
    assert unread.pop_newest(9) == ["D"] and unread.pop_newest(9) == []


def test_forecast_cache_evicts_least_recently_used() -> None:
    seen, remembered = CachedForecast(certain(7, "model"), b"packed", 1), ForecastCache(2)
    a, b, c = (Query("demo", "", 1, 9, prompt=Prompt("", text, 1)) for text in "abc")
    remembered.put(a, seen)
    remembered.put(b, seen)
    assert remembered.get(replace(a, max_tokens=50)) is seen  # regardless of max_tokens
    remembered.put(c, seen)
    assert [remembered.get(query) for query in (a, b, c)] == [seen, None, seen]
    remembered.put(replace(b, prompt=None), seen)
    assert remembered.get(replace(b, prompt=None)) is None
    others = (replace(a, model="other"), replace(a, application="chat"))
    assert [remembered.get(other) for other in others] == [None, None]


def test_history_answers_then_reading_improves_once() -> None:
    machine = ForecasterHarness()
    assert machine.ask("a") == ("plain", "history")
    read = machine.read(machine.next_batch())
    assert read.improved == (("a", certain(9, "model")),) and read.requested_at_s == (1.0,)
    waiting = machine.pending.pop("a")
    assert waiting and waiting.packed == PACKED and waiting.pair.by_model == certain(9, "model")
    assert machine.next_batch() == []


def test_words_answer_before_reading() -> None:
    machine = ForecasterHarness(Model(words=True))
    assert machine.ask("a") == ("words", "words")
    assert [f.source for _, f in machine.read(machine.next_batch()).improved] == ["model"]


def test_repeated_prompt_is_answered_from_cache() -> None:
    machine = ForecasterHarness()
    machine.ask("a", "hello")
    machine.read(machine.next_batch())
    assert machine.ask("b", "hello") == ("remembered", "model")
    assert machine.next_batch() == []
    waiting = machine.pending.pop("b")
    assert waiting and waiting.packed == PACKED


def test_outdated_cached_forecast_is_given_and_reread() -> None:
    machine = ForecasterHarness()
    machine.ask("a", "hello")
    machine.read(machine.next_batch())
    machine.model.edition = 2
    assert machine.ask("b", "hello") == ("remembered", "model")
    assert names(machine.next_batch()) == ["b"]


def test_repeated_request_is_read_once() -> None:
    machine = ForecasterHarness()
    machine.ask("a")
    machine.ask("a")
    batch = machine.next_batch()
    machine.ask("a")
    assert names(batch) == ["a"] and machine.next_batch() == []
    machine.ask("b")
    machine.read(machine.next_batch())
    machine.model.edition = 2
    machine.ask("b")
    assert machine.next_batch() == []


def test_ended_request_is_read_last_without_improvement() -> None:
    machine = ForecasterHarness()
    for name in "abcd":
        machine.ask(name)
    machine.end("a")
    machine.end("c")
    machine.end("d", FinishReason.CANCELLED)
    assert names(machine.next_batch()) == ["b"]
    batch = machine.next_batch()
    assert names(batch) == ["c", "a"]
    read = machine.read(batch)
    assert read.improved == () and (read.waiting, read.ended) == (0, 2)
    assert [(ended.outcome.request_id, packed) for ended, packed in read.ended_features] == [
        ("c", PACKED),
        ("a", PACKED),
    ]


def test_request_ending_during_reading_is_learned() -> None:
    machine = ForecasterHarness()
    machine.ask("a")
    machine.ask("b")
    batch = machine.next_batch()
    machine.end("a")
    machine.end("b", FinishReason.CANCELLED)
    read = machine.read(batch)
    assert read.improved == ()
    assert [ended.outcome.request_id for ended, _ in read.ended_features] == ["a"]


def test_request_without_outcome_is_forgotten_wherever_it_is() -> None:
    machine = ForecasterHarness()
    machine.ask("reading")
    batch = machine.next_batch()
    machine.ask("unread")
    for name in ("reading", "unread", "unknown"):
        machine.two_stage.drop(name)
    read = machine.read(batch)
    assert (read.improved, read.ended_features) == ((), ())
    assert not machine.pending and not machine.next_batch()


def test_evicted_request_is_not_read() -> None:
    machine = ForecasterHarness(unread_max=2)
    for name in "abc":
        machine.ask(name)
    assert names(machine.next_batch()) == ["c", "b"] and machine.two_stage.unread.dropped == 1


def test_set_aside_model_is_scored_but_not_used() -> None:
    machine = ForecasterHarness()
    machine.ask("a")
    assert machine.guarded.compare(("demo", ""), [1.0] * MIN_OUTCOMES)
    assert machine.read(machine.next_batch()).improved == ()
    waiting = machine.pending.pop("a")
    assert waiting and waiting.pair.by_model == certain(9, "model")
    assert waiting.pair.given.source == "history"


def test_unreadable_prompt_is_counted_and_keeps_answer() -> None:
    machine = ForecasterHarness()
    machine.ask("a")
    machine.two_stage.read(machine.next_batch(), [PromptReading(failed_step="failed")])
    assert (machine.reported[-1].improved, machine.reported[-1].failed_steps) == ((), ("failed",))
    waiting = machine.pending.pop("a")
    assert waiting and waiting.pair.given.source == "history"

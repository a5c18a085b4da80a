"""The worker's compilation of grammars: no request waits too long, and no step at all."""

from functools import partial

import pytest

from foretoken.running.options import demo_model
from services.worker.engine.sampling import grammars as module
from services.worker.engine.sampling.grammars import Grammars
from tests.reach import until
from tests.worker.engine.grammar_cases import (
    eos_ids,
    json_grammar,
    regex_grammar,
    tokenizer,
)


def make_grammars(limit_s: float = 60.0) -> Grammars:
    made = Grammars(demo_model(), tokenizer().get_vocab_size(), eos_ids(), limit_s)
    made.load()
    return made


def large_grammar(properties: int = 3_000) -> str:
    """Takes about a second to compile."""
    names = {f"property_{at}": {"type": "string"} for at in range(properties)}
    return json_grammar({"type": "object", "properties": names})


async def test_grammar_beyond_the_time_limit_is_refused_and_remembered() -> None:
    grammars, slow = make_grammars(0.05), large_grammar()
    began = grammars.compile(slow)
    assert grammars.find_fault(slow)  # at once, whatever the state
    await until(began.done, 30)
    assert "takes more than 0.05 s to compile" in grammars.find_fault(slow)
    assert grammars.compile(slow) is began


async def test_small_grammar_does_not_wait_for_large_ones() -> None:
    grammars = make_grammars()
    large = [grammars.compile(large_grammar(2_000 + at)) for at in range(4)]
    small = grammars.compile(regex_grammar("a+"))
    await until(small.done, 30)
    assert not all(each.done() for each in large)
    assert grammars.find_fault(regex_grammar("a+")) == ""
    for each in large:
        each.set_exception(ValueError("not needed"))  # those that wait are not compiled


async def test_full_queue_refuses_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILING", 1)
    grammars, large = make_grammars(), large_grammar(1_500)
    compiled = grammars.compile(large)
    assert grammars.is_full
    assert "wait for compilation; retry later" in grammars.find_fault(regex_grammar("b"))
    await until(compiled.done, 60)
    assert not grammars.is_full and grammars.find_fault(large) == ""


async def test_unused_grammars_are_forgotten_within_their_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    grammars = make_grammars()
    texts = [regex_grammar(f"a{{{count}}}") for count in range(1, 6)]
    for text in texts:
        await until(partial(grammars.compile(text).done), 30)
    assert grammars.keeps_too_many
    grammars.forget_unused({texts[0]})
    kept = [grammars.find_fault(text) == "" for text in texts]
    assert kept == [True, False, False, True, True]
    monkeypatch.setattr(module, "MAX_KEPT_CHARS", len(texts[4]))
    grammars.forget_unused(set())
    assert [grammars.find_fault(text) == "" for text in texts] == [False] * 4 + [True]

"""The demo model with grammars: every answer follows its grammar, and is the same whatever happens
to its request."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.core import FinishReason, StaticBatch
from services.worker.engine import assembly
from services.worker.engine.interface import StepFailed
from services.worker.engine.step import Engine
from services.worker.requests.types.batch import StepBatch, StepResult
from services.worker.requests.types.grammar import GrammarMatcher
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams
from tests.examples import examples
from tests.worker.engine.grammar_cases import (
    SAMPLINGS,
    SCHEMAS,
    asked,
    follows,
    ids_of,
    is_complete,
    json_grammar,
    load,
    regex_grammar,
    text_of,
)
from tests.worker.worker_fixtures import Feeder, PausingFeeder, add_prepared

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
REGEXES = (r"[a-z]{3,9}( [0-9]{1,4}){2}", r"(yes|no|maybe), (I|we) (do|don't)\.", r"\d{3}-\d{4}")
Request = tuple[tuple[int, ...], int, SamplingParams]


class FailingFeeder(Feeder):
    """Collects the requests that a grammar ended, with their sentences."""

    def __init__(self, engine: Engine, slice_tokens: int = 0):
        super().__init__(engine, slice_tokens)
        self.failed: dict[str, str] = {}
        self.on_step = self._note

    def _note(self, result: StepResult) -> None:
        self.failed |= {sequence.request_id: why for sequence, why in result.failed}


class TryingFeeder(Feeder):
    """Goes on after failed steps; `ended` are the requests that these ended."""

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self.ended: list[str] = []

    def step(self) -> bool:
        try:
            return super().step()
        except StepFailed as failure:
            self.ended += [sequence.request_id for sequence in failure.sequences]
            return True


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load()


# Every answer follows its grammar


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.tuples(SCHEMAS, SAMPLINGS), min_size=6, max_size=9))
def test_answers_satisfy_random_schemas(engine, cases):
    engine.reset()
    feeder = FailingFeeder(engine)
    for number, (schema, sampling) in enumerate(cases):
        how = replace(sampling, grammar=json_grammar(schema))
        feeder.add(f"r{number}", asked(f"Count from {number} to {number + 5}."), 400, how)
    feeder.run()
    for number, (schema, _) in enumerate(cases):
        answer = feeder.output[f"r{number}"]
        assert feeder.finished[f"r{number}"] is FinishReason.STOP, text_of(answer)
        assert is_complete(json_grammar(schema), answer)
        jsonschema.validate(json.loads(text_of(answer)), schema)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("regex", REGEXES)
def test_answers_match_regexes(engine, regex, temperature):
    engine.reset()
    feeder = Feeder(engine)
    for seed in range(8):
        how = SamplingParams(temperature=temperature, seed=seed, grammar=regex_grammar(regex))
        feeder.add(f"r{seed}", asked("Write star 3 times."), 200, how)
    for answer in feeder.run().values():
        assert re.fullmatch(regex, text_of(answer)), text_of(answer)


def test_answer_that_is_too_long_ends_with_its_budget(engine):
    engine.reset()
    feeder = Feeder(engine)
    how = SamplingParams(temperature=1, seed=1, grammar=json_grammar(PERSON))
    feeder.add("r", asked("Count from 1 to 5."), 12, how)
    assert feeder.run() and feeder.finished["r"] is FinishReason.LENGTH
    assert len(feeder.output["r"]) == 12 and follows(how.grammar, feeder.output["r"])


# The same answers, whatever happens


def requests() -> dict[str, Request]:
    """Requests with and without grammars, with various samplings."""
    schemas: tuple[Any, ...] = (
        PERSON,
        {"type": "array", "items": {"enum": ["red", "green", 3]}, "minItems": 2, "maxItems": 4},
        {"type": "string", "maxLength": 12},
    )
    samplings = (
        GREEDY,
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=2.0, seed=4, logprobs=2),
        SamplingParams(temperature=1.0, seed=5, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=0.6, seed=6, top_k=9, ignore_eos=True, min_tokens=6),
        SamplingParams(temperature=1.0, seed=7, bad_tokens=((69,), (6, 82))),
    )
    grammars = [*map(json_grammar, schemas), *map(regex_grammar, REGEXES)]
    made: dict[str, Request] = {}
    for number, sampling in enumerate(3 * samplings):
        text = f"Count from {number} to {number + 9}."
        how = replace(sampling, grammar=grammars[number % len(grammars) - number // 6])
        made[f"g{number}"] = asked(text), 160, how
        if number % 3 == 0:
            made[f"p{number}"] = asked(text), 20 + number, replace(sampling, ignore_eos=False)
    return made


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """Each answer without neighbours, drawn token by token."""
    engine, answers = load(), dict[str, list[int]]()
    for name, request in requests().items():
        feeder = Feeder(engine)
        feeder.add(name, *request)
        feeder.plan(batches=(StaticBatch(1, (name,)),))
        answers |= feeder.run()
        engine.reset()
    assert engine.state.counters.drafts == 0
    return answers


def run(feeder: Feeder) -> dict[str, list[int]]:
    for name, request in requests().items():
        feeder.add(name, *request)
    return dict(feeder.run())


def test_answers_alone_follow_their_grammars(alone):
    ended = 0
    for name, (_, _, sampling) in requests().items():
        if sampling.grammar:
            assert follows(sampling.grammar, alone[name])
            ended += is_complete(sampling.grammar, alone[name])
    assert ended >= 15


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batch_tokens": 24},  # prompts in chunks, drafts share the rest
        {"kv_tokens": 320},  # memory for a few requests
        {"block_tokens": 2, "prefix_sharing": False},
        {"overlap": "on"},
        {"overlap": "on", "kv_tokens": 320},
        {"speculative_tokens": 4, "prompt_lookup_min": 1},
        {"kernels": "torch"},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_neighbours_and_settings(settings, alone):
    feeder = Feeder(load(**settings), slice_tokens=11)
    assert run(feeder) == alone
    counters = feeder.engine.state.counters
    assert counters.drafts > 0 and (feeder.evictions > 0) == ("kv_tokens" in settings)


def test_masks_of_several_threads_are_the_same(alone, monkeypatch):
    monkeypatch.setattr(assembly, "_mask_threads", lambda *_: 3)
    assert run(Feeder(load(speculative_tokens=4))) == alone


@pytest.mark.parametrize("settings", [{}, {"overlap": "on"}, {"host_gib": 0.1}], ids=str)
def test_paused_and_swapped_answers_are_the_same(settings, alone):
    feeder = PausingFeeder(load(kv_tokens=512, **settings))
    assert run(feeder) == alone


def test_answers_in_static_batches_are_the_same(alone):
    """Members that have ended go on drawing."""
    feeder = Feeder(load(max_running=64))
    names = list(requests())
    for name, request in requests().items():
        feeder.add(name, *request)
    half = len(names) // 2
    feeder.plan(batches=(StaticBatch(1, tuple(names[:half])), StaticBatch(2, tuple(names[half:]))))
    assert feeder.run() == alone
    assert feeder.engine.state.counters.invalid_tokens > 0


def test_resubmitted_answers_continue_at_another_worker(alone, engine):
    """With 1, 2, … delivered tokens, as after the loss of a worker."""
    for name, (prompt, most, sampling) in requests().items():
        answer = alone[name]
        for delivered in {1, 3, len(answer) // 2, len(answer) - 1} & set(range(1, len(answer))):
            engine.reset()
            tokens = (*prompt, *answer[:delivered])
            assert add_prepared(engine, Prompt(name, tokens, len(prompt), most, sampling)) is None
            feeder = Feeder(engine)
            feeder._max_tokens[name] = most
            feeder.output[name] = list(answer[:delivered])
            feeder.plan(admit=(feeder._grant(name),))
            assert feeder.run()[name] == answer


def test_failing_steps_change_no_answer(alone, monkeypatch):
    """Some steps of several rows fail after their masks were filled."""
    engine = load()
    compute, random, failures = engine.run, Random(2), 0

    def breaks(batch: StepBatch) -> Tensor:
        nonlocal failures
        if len(batch.sequences) > 2 and random.random() < 0.3:
            failures += 1
            raise RuntimeError("broken")
        return compute(batch)

    monkeypatch.setattr(engine, "run", breaks)
    feeder = TryingFeeder(engine)
    assert run(feeder) == alone
    assert failures > 3 and not feeder.ended


# Options of sampling


def drawn(engine: Engine, **how: Any) -> tuple[list[int], FinishReason]:
    engine.reset()
    feeder = Feeder(engine)
    feeder.add("r", asked("Count from 1 to 5."), 100, SamplingParams(seed=1, **how))
    return feeder.run()["r"], feeder.finished["r"]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({}, "alpha"),
        ({"ignore_eos": True}, "alpha"),  # nothing can follow a complete grammar
        ({"min_tokens": 50}, "alpha"),
        ({"logit_bias": ((0, 100.0),)}, "alpha"),
        ({"presence_penalty": 2.0}, "alpha"),
        ({"bad_tokens": ((69,),)}, "alpha"),  # as the grammar leaves nothing else
    ],
    ids=str,
)
def test_complete_grammar_ends_the_answer(engine, how, text):
    tokens, reason = drawn(engine, grammar=regex_grammar("alpha"), **how)
    assert (text_of(tokens), reason) == (text, FinishReason.STOP)


def test_min_tokens_postpones_an_end_that_the_grammar_allows(engine):
    tokens, reason = drawn(engine, grammar=regex_grammar("[a-c ]*"), min_tokens=20, temperature=2.0)
    assert len(tokens) > 20 and reason is FinishReason.STOP


def test_logprobs_of_an_answer_are_raw(engine):
    """Of the forced first token, too: the model alone would have drawn another one."""
    engine.reset()
    feeder = Feeder(engine)
    how = SamplingParams(temperature=0, logprobs=1, grammar=regex_grammar("zzzz"))
    feeder.add("r", asked("Count from 1 to 5."), 9, how)
    feeder.run()
    first = feeder.drawn["r"][0].logprobs
    assert first is not None and first.chosen < first.top[0]


# Requests that cannot go on


def test_request_without_an_allowed_token_ends_alone(engine, alone):
    """Its neighbours are not affected; it has delivered what it could."""
    engine.reset()
    feeder = FailingFeeder(engine)
    digits = ids_of("0123456789")
    how = SamplingParams(
        temperature=0, grammar=regex_grammar("[0-9]{4}x"), allowed_token_ids=digits
    )
    feeder.add("stuck", asked("Count from 1 to 5."), 50, how)
    assert run(feeder).items() >= alone.items()
    assert feeder.finished["stuck"] is FinishReason.ERROR
    assert "no token that the request allows" in feeder.failed["stuck"]
    assert len(text_of(feeder.output["stuck"])) == 4


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_delivered_tokens_outside_the_grammar_end_the_request(overlap):
    engine = load(overlap=overlap)
    prompt = asked("Count from 1 to 5.")
    how = SamplingParams(temperature=0, grammar=regex_grammar("[0-9]+"))
    wrong = (*prompt, *ids_of("x"))
    add_prepared(engine, Prompt("r", wrong, len(prompt), 20, how))
    feeder = FailingFeeder(engine)
    feeder._max_tokens["r"] = 20
    feeder.plan(admit=(feeder._grant("r"),))
    feeder.add("other", prompt, 20)
    feeder.run()
    assert feeder.finished["r"] is FinishReason.ERROR and not feeder.output["r"]
    assert feeder.failed["r"].startswith("the answer cannot follow its schema or grammar")
    assert feeder.finished["other"] is FinishReason.STOP


class Panic(BaseException):
    """As PyO3 raises it."""


def test_defect_of_llguidance_ends_one_request(engine, alone, monkeypatch):
    """It panics on the second mask of one request."""
    note = GrammarMatcher.note

    def panics(matcher: GrammarMatcher, tokens: Sequence[int]) -> None:
        if list(tokens) == [*ids_of("!")]:
            raise Panic
        note(matcher, tokens)

    monkeypatch.setattr(GrammarMatcher, "note", panics)
    engine.reset()
    feeder = TryingFeeder(engine)
    how = SamplingParams(temperature=0, grammar=regex_grammar("![0-9]{4}"))
    feeder.add("bad", asked("Count from 1 to 5."), 50, how)
    assert run(feeder).items() >= alone.items()
    assert feeder.ended == ["bad"] and feeder.output["bad"] == [*ids_of("!")]


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("{nonsense", "the schema or grammar cannot be used: "),
        (json_grammar({"type": "object", "patternProperties": {"(?=a)": {}}}), "cannot be used"),
        (regex_grammar("(a"), "cannot be used"),
    ],
)
def test_unusable_grammar_is_refused(engine, grammar, why):
    engine.reset()
    prompt = Prompt("r", asked("hi"), len(asked("hi")), 9, SamplingParams(grammar=grammar))
    refusal = add_prepared(engine, prompt)
    assert refusal is not None and why in refusal and len(refusal) < 500


def test_long_grammar_is_refused():
    with pytest.raises(ValueError, match="grammar must have at most 1048576 characters"):
        SamplingParams(grammar="x" * 2**21)


def test_forced_tokens_take_fewer_steps(engine):
    """A constant of many tokens is drawn in a few steps."""
    engine.reset()
    feeder, steps = Feeder(engine), 0
    how = SamplingParams(temperature=0, grammar=json_grammar({"const": "nothing but this text"}))
    feeder.add("r", asked("Count from 1 to 5."), 100, how)
    while not feeder.finished:
        feeder.step()
        steps += 1
    assert len(feeder.output["r"]) > 3 * steps
    assert engine.state.counters.accepted_tokens > 0

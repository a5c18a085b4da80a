"""The engine with a step in flight: its inputs, answers and timings, and failing steps."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from foretoken.running.options import demo_model
from services.core import FinishReason, Grant, Plan, StaticBatch
from services.worker.config import EngineConfig
from services.worker.engine.inputs import StepInputs
from services.worker.engine.interface import StepFailed
from services.worker.engine.sampling.drawn import DrawnTokens
from services.worker.engine.step import Engine
from services.worker.engine.step_clock import StepClock
from services.worker.kv.device_streams import ImmediateStreams, Lane
from services.worker.requests.types.batch import DecodeRows, StepBatch
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams
from services.worker.requests.types.sequence import Sequence
from tests.system.mixed_load import (
    ExpectedAnswer,
    expected_answers,
    load_requests,
    load_text,
    sampling_of,
)
from tests.worker.worker_fixtures import Feeder, clear_cases, engine_of, prompt_tokens

ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
LENGTHS = (1, 5, 13, 16, 29, 40)


# Inputs


def rows_of(*sampling_rows: int) -> DecodeRows:
    rows = []
    for number, row in enumerate(sampling_rows):
        sequence = Sequence.start(Prompt(f"r{number}", (1, 50 + number), 2, 9), 9)
        sequence.computed = 1
        if row >= 0:
            sequence.advance(row)
        rows.append(sequence)
    return DecodeRows(rows, [[0]] * len(rows), 4)


@pytest.mark.parametrize(
    ("sampling_rows", "tokens"),
    [
        ((-1, -1), [50, 51]),
        ((1, -1, 0), [101, 100, 51]),
        ((0, 1), [100, 101]),
        ((1, 0), [101, 100]),
        ((0, 1, 2), [100, 101, 102]),
    ],
)
def test_rows_read_tokens_on_the_device(sampling_rows, tokens):
    """Rows that read from the device come first, because they are one token longer."""
    drawn = torch.tensor([100, 101, 102])
    inputs = StepInputs(torch.device("cpu")).prepare(StepBatch(rows_of(*sampling_rows), []), drawn)
    assert inputs.tokens.tolist() == tokens
    assert (inputs.tokens is drawn) == (sampling_rows == (0, 1, 2)), "nothing is gathered"


def test_fed_tokens_are_not_read_on_the_host():
    """Reading a value of a fake tensor would raise."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        drawn = torch.zeros(3, dtype=torch.long)
        inputs = StepInputs(torch.device("cpu")).prepare(StepBatch(rows_of(1, -1, 0), []), drawn)
    assert inputs.tokens.shape == (3,)


# The engine


def test_static_batch_may_arrive_while_a_step_is_in_flight():
    """Three decoding requests become members; their answers stay the same."""
    cases = clear_cases("llama", LENGTHS, 24)
    feeder = Feeder(engine_of("llama", overlap="on"))
    for request_id, (tokens, _) in cases.items():
        feeder.add(request_id, tokens, 24)
    for _ in range(5):
        feeder.step()
    assert feeder.engine.state.steps.in_flight
    feeder.plan(batches=(StaticBatch(1, tuple(list(cases)[:3])),))
    assert feeder.run() == {request_id: answer for request_id, (_, answer) in cases.items()}


@pytest.mark.slow
def test_overlapped_answers_equal_sequential_ones_under_mixed_load():
    """Seeded and penalized draws, stops and common prefixes, with memory for a few of the
    requests."""
    config = EngineConfig(
        model=demo_model(),
        device="cpu",
        dtype="float32",
        kv_tokens=1024,
        max_running=24,
        overlap="on",
    )
    feeder = Feeder(Engine.load(config), slice_tokens=24)
    for number, request in enumerate(load_requests()):
        prompt = load_text().encode_chat(request.turns)
        for choice in range(request.choices):
            how = sampling_of(request, choice)
            feeder.add(f"{number}/{choice}", prompt, request.sampling["max_tokens"], how)
    answers = feeder.run()
    right: dict[str, ExpectedAnswer] = {
        f"{number}/{choice}": each
        for number, choices in enumerate(expected_answers())
        for choice, each in enumerate(choices)
    }
    assert {name: tuple(tokens) for name, tokens in answers.items()} == {
        name: each.tokens for name, each in right.items()
    }
    counters = feeder.engine.state.counters
    assert counters.stray_rows > 0 and counters.prefix_hit_tokens > 0 and feeder.evictions > 0


def test_steady_decode_composes_and_gathers_nothing(monkeypatch):
    """One batch advances in place and reads the drawn tensor without a copy."""
    engine = engine_of("llama", block_tokens=4, overlap="on")
    for request_id in ("a", "b"):
        engine.add(Prompt(request_id, prompt_tokens(1, 6), 6, 50, ENDLESS), 0.0)
    engine.state.apply_plan(Plan(1, admit=(Grant("a", 50), Grant("b", 20))), 0.0)
    batches: list[StepBatch] = []
    fed: list[bool] = []
    prepare = engine._inputs.prepare

    def note(batch: StepBatch, drawn: Tensor | None = None) -> Any:
        inputs = prepare(batch, drawn)
        batches.append(batch)
        fed.append(inputs.tokens is drawn)
        return inputs

    monkeypatch.setattr(engine._inputs, "prepare", note)
    while engine.step():
        pass
    assert len(batches) == 50 and len({id(batch) for batch in batches}) == 3
    assert fed == [False, *[True] * 19, False, *[True] * 29]


@dataclass
class Mark:
    """The number of an issued event."""

    at: int

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Ordered(ImmediateStreams):
    """Streams with the number of recorded events as time."""

    def __init__(self) -> None:
        self.events = 0

    def record(self, lane: Lane) -> Mark:
        self.events += 1
        return Mark(self.events)

    def elapsed_s(self, start: Any, end: Any) -> float:
        return float(end.at - start.at)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_step_time_is_its_own_with_several_in_flight(overlap):
    """The time is from the start to the end of a step on the device, one event later, whether or
    not the next step is launched before its tokens are read."""
    feeder = Feeder(engine_of("llama", overlap=overlap))
    feeder.engine._clock = StepClock(Ordered())
    times: list[float] = []
    feeder.on_report = lambda report: times.extend(t.elapsed_s for t in report.timings)
    feeder.add("a", prompt_tokens(1, 5), 6, ENDLESS)
    feeder.run()
    assert times == [1.0] * 6


class LateFailure:
    """A device that reports a failed step only when its tokens are read: a step that reads the
    poison token, and any step launched behind it."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, poison: int):
        forward, draw = engine.model.forward, engine._sampler.draw
        self.poison = poison
        self.raised = 0
        self._seen = False

        def sees(tokens: Tensor, *rest: Any) -> Tensor:
            self._seen = self.poison in tokens.tolist()
            return forward(tokens, *rest)

        def draws(*given: Any) -> DrawnTokens:
            drawn = draw(*given)
            if self._seen:
                drawn.to_host = self._breaks  # type: ignore[method-assign]  # a fault is injected
            return drawn

        monkeypatch.setattr(engine.model, "forward", sees)
        monkeypatch.setattr(engine._sampler, "draw", draws)

    def _breaks(self) -> Any:
        self.raised += 1
        raise RuntimeError("poison")


@pytest.mark.parametrize("late", [False, True])
def test_poisoned_request_ends_alone_with_a_step_in_flight(late, monkeypatch):
    """The request arrives while five others decode and one prefills. A token that one of them draws
    fails another step later."""
    cases = clear_cases("llama", (9, 14, 22, 5, 18), 24)
    poison = 1  # a token of no prompt and no answer here
    assert all(poison not in (*tokens, *answer) for tokens, answer in cases.values())
    engine = engine_of("llama", overlap="on", block_tokens=4)
    feeder = Feeder(engine)
    breaking = LateFailure(engine, monkeypatch, poison)
    if not late:
        monkeypatch.setattr(
            DrawnTokens, "__init__", _breaks_at_once(breaking, DrawnTokens.__init__)
        )
    for name, (tokens, _) in cases.items():
        feeder.add(name, tokens, 24)
    failed: list[str] = []

    def step() -> bool:
        try:
            return feeder.step()
        except StepFailed as failure:
            failed.extend(sequence.request_id for sequence in failure.sequences)
            engine.state.check_integrity()
            if report := engine.state.report():
                feeder._read(report)
            return True

    for _ in range(6):
        step()
    assert engine.state.steps.in_flight
    feeder.add("bad", (5, poison, 7), 24)
    feeder.add("behind", prompt_tokens(3, 11), 1)
    while engine.state.sequences:
        assert step()
    assert failed == ["bad"] and feeder.finished["bad"] is FinishReason.ERROR
    assert not feeder.output["bad"]
    assert {n: feeder.output[n] for n in cases} == {n: answer for n, (_, answer) in cases.items()}
    assert len(feeder.output["behind"]) == 1
    assert engine.state.pool.free_blocks == engine.state.pool.blocks


def _breaks_at_once(breaking: LateFailure, init: Any) -> Any:
    def breaks(drawn: DrawnTokens, *rest: Any) -> None:
        if breaking._seen:
            breaking._breaks()
        init(drawn, *rest)

    return breaks


def test_reset_drops_the_step_in_flight():
    engine = engine_of("llama", overlap="on")
    feeder = Feeder(engine)
    feeder.add("a", prompt_tokens(1, 5), 20, ENDLESS)
    feeder.step()
    assert engine.state.steps.in_flight
    engine.reset()
    assert engine.state.idle and engine.step() is None
    again = Feeder(engine)
    again.add("a", prompt_tokens(1, 5), 20, ENDLESS)
    alone = Feeder(engine_of("llama"))
    alone.add("a", prompt_tokens(1, 5), 20, ENDLESS)
    assert again.run() == alone.run()


def test_penalized_request_is_drawn_ahead():
    """The device counts the token of the step in flight. The answers equal those of sequential
    steps."""
    how = SamplingParams(temperature=0, ignore_eos=True, repetition_penalty=1.3)
    answers: list[dict[str, list[int]]] = []
    flights: list[list[bool]] = []
    for overlap in ("off", "on"):
        engine = engine_of("llama", overlap=overlap)
        feeder = Feeder(engine)
        feeder.add("penalized", prompt_tokens(1, 5), 24, how)
        feeder.add("plain", prompt_tokens(2, 5), 9, GREEDY)
        flights.append([])
        while feeder.step():
            flights[-1].append(engine.state.steps.in_flight)
        answers.append(dict(feeder.output))
    assert answers[0] == answers[1] and len(answers[0]["penalized"]) == 24
    assert not any(flights[0]) and all(flights[1][:20])


def test_overlap_is_off_on_a_cpu_by_default():
    assert not engine_of("llama")._overlap
    assert engine_of("llama", overlap="on")._overlap
    assert not engine_of("llama", overlap="off")._overlap

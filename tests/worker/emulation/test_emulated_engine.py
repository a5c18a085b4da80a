"""The emulated engine: step times by hand, and the simulator's worker as an oracle."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core import FinishReason, Grant, Pause, Plan, Residency, StaticBatch
from services.costs import CostModel, Direction
from services.worker.engine.phase_clock import EnginePhase
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import Prompt, SamplingParams
from simulator.hardware.hardware import EOS, Hardware
from tests.worker.emulation.virtual_time import (
    VOCABULARY,
    Timed,
    VirtualClock,
    emulate,
    engine_with,
    simulate,
)

# 1 s a step, 0.1 s a prefilled token, 0.01 s a decoding sequence, 0.001 s a token of context.
BY_HAND = CostModel(1.0, 0.1, 0.01, 0.001, offload_token_s=0.5, upload_token_s=0.25)
LIMITS = Limits(kv_blocks=64, eos_ids=frozenset({EOS}), host_blocks=64, prefix_sharing=False)
SMALL = Hardware(
    "small",
    CostModel(0.01, 1e-4, 1e-4, 1e-6, offload_token_s=1e-5, upload_token_s=2e-5),
    kv_tokens=160,
    host_tokens=320,
    block_tokens=4,
    max_running=6,
    max_batch_tokens=24,
)


def prompt(name: str, tokens: int, most: int, sampling: SamplingParams | None = None) -> Prompt:
    ids = tuple(range(2, 2 + tokens))
    return Prompt(name, ids, tokens, most, sampling or SamplingParams())


def lengths_of(*prompts: tuple[Prompt, int]) -> dict[str, int]:
    return {str(list(each.token_ids)): tokens for each, tokens in prompts}


def test_steps_take_what_the_hardware_costs():
    """Ten tokens of prompt: 1 + 10 · 0.1 + 10 · 0.001 s; then one row that reads 10, 11 tokens."""
    clock, asked = VirtualClock(), prompt("r", 10, 99)
    engine = engine_with(BY_HAND, LIMITS, clock, lengths_of((asked, 3)))
    assert engine.add(asked, 0.0) is None
    engine.state.apply_plan(Plan(1, admit=(Grant("r", 99),)), 0.0)
    results = [engine.step() for _ in range(4)]
    assert clock.slept == pytest.approx([2.01, 2.01 + 1.02, 2.01 + 1.02 + 1.021])
    assert results[3] is None
    steps = [result for result in results if result]
    assert [token.finish for step in steps for token in step.tokens] == [
        None, None, FinishReason.STOP,
    ]  # fmt: skip
    [first], [last] = steps[0].timings, steps[2].timings
    assert (first.prefill_tokens, first.decode_seqs, first.context_tokens) == (10, 0, 10)
    assert (last.prefill_tokens, last.decode_seqs, last.context_tokens) == (0, 1, 11)
    assert [first.elapsed_s, last.elapsed_s] == pytest.approx([2.01, 1.021])
    assert engine.phases.seconds[EnginePhase.MODEL] == pytest.approx(clock.now())


def test_copies_take_what_the_links_cost():
    """The KV of 11 tokens leaves the device while nothing runs, and must be back before the next
    step: 5.5 s on one link, then 2.75 s on the other."""
    clock, asked = VirtualClock(), prompt("r", 10, 99)
    engine = engine_with(BY_HAND, LIMITS, clock, lengths_of((asked, 9)))
    engine.add(asked, 0.0)
    engine.state.attach()
    engine.state.apply_plan(Plan(1, admit=(Grant("r", 2),)), 0.0)
    assert engine.step() and engine.step() and engine.step() is None
    began_s = clock.now()
    engine.state.apply_plan(Plan(2, pause=(Pause("r", Residency.OFFLOAD),)), 0.0)
    assert engine.step() is None
    engine.state.apply_plan(Plan(3, admit=(Grant("r", 9),)), 0.0)
    result = engine.step()
    assert result and len(result.tokens) == 1
    back_s = began_s + 11 * (0.5 + 0.25)
    assert clock.slept[-2:] == pytest.approx([back_s, back_s + 1.0 + 0.01 + 0.011])
    assert engine.phases.seconds[EnginePhase.SWAP] == pytest.approx(back_s - began_s)
    assert [(swap.direction, swap.tokens) for swap in result.swaps] == [
        (Direction.OFFLOAD, 11),
        (Direction.UPLOAD, 11),
    ]
    assert [swap.elapsed_s for swap in result.swaps] == pytest.approx([5.5, 2.75])


def test_quantized_copies_delay_the_step_beside_them():
    """Half of 0.2 s a token in each direction: 11 tokens leave beside a step of another request."""
    cost = replace(BY_HAND, quantize_token_s=0.2)
    clock, first, second = VirtualClock(), prompt("a", 10, 99), prompt("b", 3, 99)
    engine = engine_with(cost, LIMITS, clock, lengths_of((first, 50), (second, 50)))
    engine.add(first, 0.0)
    engine.state.apply_plan(Plan(1, admit=(Grant("a", 2),)), 0.0)
    assert engine.step() and engine.step()
    began_s = clock.now()
    engine.add(second, 0.0)
    plan = Plan(2, admit=(Grant("b", 9),), pause=(Pause("a", Residency.OFFLOAD),))
    engine.state.apply_plan(plan, 0.0)
    engine.step()
    assert clock.now() - began_s == pytest.approx(1.0 + 0.3 + 0.003 + 11 * 0.1)


def test_request_controls_where_its_answer_ends():
    asked = {
        "cut": prompt("cut", 4, 3),
        "long": prompt("long", 5, 9, SamplingParams(min_tokens=6)),
        "endless": prompt("endless", 6, 8, SamplingParams(ignore_eos=True)),
        "plain": prompt("plain", 7, 8),
    }
    known = lengths_of(*((each, 4) for each in asked.values()))
    engine = engine_with(BY_HAND, LIMITS, VirtualClock(), known)
    for each in asked.values():
        engine.add(each, 0.0)
    engine.state.apply_plan(Plan(1, admit=tuple(Grant(name, 9) for name in asked)), 0.0)
    ends: dict[str, tuple[int, FinishReason]] = {}
    while result := engine.step():
        ends |= {t.request_id: (t.offset + 1, t.finish) for t in result.tokens if t.finish}
    assert ends == {
        "cut": (3, FinishReason.LENGTH),
        "long": (7, FinishReason.STOP),
        "endless": (8, FinishReason.LENGTH),
        "plain": (4, FinishReason.STOP),
    }


def test_logprobs_are_those_of_certain_tokens():
    engine = engine_with(BY_HAND, LIMITS, VirtualClock())
    engine.add(prompt("r", 4, 9, SamplingParams(logprobs=2)), 0.0)
    engine.state.apply_plan(Plan(1, admit=(Grant("r", 1),)), 0.0)
    result = engine.step()
    assert result
    [token] = result.tokens
    assert token.logprobs == (0.0, (token.token_id,), (0.0,))


@pytest.mark.parametrize(
    ("ids", "sampling", "why"),
    [
        ((2, VOCABULARY), SamplingParams(), "token_ids must lie in"),
        ((2,), SamplingParams(stop_token_ids=(VOCABULARY,)), "stop_token_ids must lie in"),
        ((2, 3), SamplingParams(prompt_logprobs=0), "does not score prompts: leave out prompt_"),
        ((2, 3), SamplingParams(grammar="{}"), "cannot make answers follow a schema or grammar"),
    ],
)
def test_impossible_request_is_refused(ids: tuple[int, ...], sampling: SamplingParams, why: str):
    engine = engine_with(BY_HAND, LIMITS, VirtualClock())
    engine.state.attach()
    refusal = engine.add(Prompt("r", ids, len(ids), 9, sampling), 0.0)
    report = engine.state.report()
    assert refusal and why in refusal
    assert report and [done.reason for done in report.finished] == [FinishReason.ERROR]


def test_reset_forgets_copies_in_progress():
    clock, asked = VirtualClock(), prompt("r", 10, 99)
    engine = engine_with(BY_HAND, LIMITS, clock, lengths_of((asked, 9)))
    for _ in range(2):
        engine.add(asked, 0.0)
        engine.state.apply_plan(Plan(1, admit=(Grant("r", 2),)), 0.0)
        assert engine.step() and engine.step()
        engine.state.apply_plan(Plan(2, pause=(Pause("r", Residency.OFFLOAD),)), 0.0)
        assert engine.step() is None
        engine.reset()
        assert engine.state.idle and engine.step() is None


REQUESTS = 8
TICK_S = 1e-6  # all costs of SMALL are multiples of it; no two commands are at one time


def at(number: int, ticks: int) -> float:
    """A time of a command that is no other command's and no end of a step."""
    return (ticks + 0.017 * (number + 1)) * TICK_S


@st.composite
def drills(draw: st.DrawFn) -> tuple[list[Timed], dict[str, int]]:
    """Prompts with common beginnings, and plans that admit, extend, pause, prefetch and cancel them
    at random times, with or without static batches."""
    names = [str(number) for number in range(REQUESTS)]
    lengths = {name: draw(st.integers(1, 30)) for name in names}
    commands: list[Timed] = []
    for number, name in enumerate(names):
        shared, own = draw(st.integers(0, 12)), draw(st.integers(1, 30))
        ids = (*range(2, 2 + shared), *([100 + number] * own))
        most = draw(st.integers(1, 40))
        commands.append(
            (at(number, draw(st.integers(0, 300_000))), Prompt(name, ids, len(ids), most))
        )
    whole = st.sampled_from(names)
    static = draw(st.booleans())
    for number in range(draw(st.integers(4, 20))):
        time_s = at(REQUESTS + number, draw(st.integers(0, 1_000_000)))
        admit = draw(st.lists(whole, unique=True, max_size=4))
        rest = [name for name in names if name not in admit]
        pause = draw(st.lists(st.sampled_from(rest), unique=True, max_size=2))
        plan = Plan(
            0,
            admit=tuple(Grant(name, draw(st.integers(1, 40))) for name in admit),
            extend=tuple(Grant(name, 40) for name in draw(st.lists(whole, max_size=1))),
            pause=tuple(Pause(name, draw(st.sampled_from(Residency))) for name in pause),
            prefetch=tuple(draw(st.lists(whole, max_size=1))),
            cancel=tuple(draw(st.lists(whole, max_size=1))) if number % 5 == 4 else (),
            batches=(StaticBatch(number + 1, tuple(admit)),) if static and admit else (),
        )
        commands.append((time_s, plan))
    commands.sort(key=lambda each: each[0])
    seqs = iter(range(1, len(commands) + 1))
    numbered: list[Timed] = [
        (time_s, replace(each, seq=next(seqs)) if isinstance(each, Plan) else each)
        for time_s, each in commands
    ]
    return numbered, lengths


@settings(max_examples=50)
@given(drill=drills(), attends_padding=st.booleans())
def test_engine_equals_the_simulated_worker(
    drill: tuple[list[Timed], dict[str, int]], attends_padding: bool
):
    commands, lengths = drill
    hardware = replace(SMALL, attends_padding=attends_padding)
    emulated = emulate(hardware, commands, lengths).steps
    simulated = simulate(hardware, commands, lengths).steps
    assert len(emulated) == len(simulated)
    for ours, theirs in zip(emulated, simulated, strict=True):
        assert ours.end_s == pytest.approx(theirs.end_s)
        assert ours.tokens == theirs.tokens
        assert ours.free_blocks == theirs.free_blocks
        assert (ours.report is None) == (theirs.report is None)
        if ours.report and theirs.report:
            one, other = (replace(r, timings=(), swaps=()) for r in (ours.report, theirs.report))
            assert one == other

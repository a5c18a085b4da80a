"""Prompts with a common beginning that arrive at once, such as the choices of one request: the
beginning is computed once."""

import pytest

from services.core import Grant, Pause, Residency
from services.costs import StepTiming
from tests.worker.requests.worker_transcript import Transcript
from tests.worker.worker_fixtures import Feeder, clear_cases, engine_of

CHOICES = 8


@pytest.mark.parametrize(
    ("max_batch_tokens", "sharing", "prefilled"),
    [(512, True, 100 + 7 * 4), (48, True, 100 + 7 * 4), (512, False, 8 * 100)],
)
def test_eight_choices_prefill_their_full_blocks_once(max_batch_tokens, sharing, prefilled):
    """100 tokens in blocks of 16: 96 in six full blocks, computed once, and 4 that each request
    computes."""
    ((tokens, answer),) = clear_cases("llama", lengths=[100], new_tokens=6).values()
    feeder = Feeder(engine_of("llama", max_batch_tokens=max_batch_tokens, prefix_sharing=sharing))
    timings: list[StepTiming] = []
    feeder.on_report = lambda report: timings.extend(report.timings)
    for choice in range(CHOICES):
        feeder.add(f"r{choice}", tokens, len(answer))
    assert list(feeder.run().values()) == [answer] * CHOICES
    assert sum(timing.prefill_tokens for timing in timings) == prefilled
    assert feeder.engine.state.counters.prefix_hit_tokens == (7 * 96 if sharing else 0)


def twins(*lengths: int, salts: str = "", **limits: int) -> Transcript:
    """Prompts a, b … that begin alike, admitted at once; blocks of 4 tokens."""
    t = Transcript(prefix_sharing=True, **{"max_batch_tokens": 32, **limits})
    names = "abcd"[: len(lengths)]
    for number, (name, length) in enumerate(zip(names, lengths, strict=True)):
        t.prompt(name, length, salt=salts[number : number + 1])
    t.plan(admit=[Grant(name, 9) for name in names])
    return t


def ran(t: Transcript) -> str:
    """What one step computes."""
    t.lines.clear()
    t.step()
    return next(line for line in t.lines if line[0] != " ").partition(" -> ")[0]


def test_equal_prompt_waits_one_step_without_delaying_others():
    """`b` and `d` find two of three blocks, because the last token is always computed."""
    t = twins(12, 12, 6, 12, salts="  s ")
    assert ran(t) == "a[0:12] c[0:6]"
    assert ran(t) == "a@12 c@6 b[8:12] d[8:12]"


def test_prompt_waits_only_for_half_of_its_work():
    """Two blocks of 4 are half of 16 tokens and less than half of 17. A single block is not
    awaited."""
    assert ran(twins(12, 16)) == "a[0:12]"
    assert ran(twins(12, 17, max_batch_tokens=64)) == "a[0:12] b[0:17]"
    assert ran(twins(8, 8)) == "a[0:8] b[0:8]"
    assert ran(twins(9, 9)) == "a[0:9]"


def test_longer_equal_prompt_waits_for_the_rest():
    """`a`, of 20 tokens in steps of 8, goes first; then `b` has all but its end."""
    t = twins(20, 20, max_batch_tokens=8)
    assert [ran(t) for _ in range(3)] == ["a[0:8]", "a[8:16]", "a[16:20] b[16:20]"]


@pytest.mark.parametrize("residency", [None, *Residency])
def test_prompt_does_not_wait_for_a_stalled_one(residency):
    """`a` is cancelled or paused during its prefill; `b` finds the computed blocks, and computes
    the rest."""
    t = twins(14, 14, 14, max_batch_tokens=8, host_blocks=8)
    assert ran(t) == "a[0:8]"
    if residency is None:
        t.plan(cancel=["a"])
    else:
        t.plan(pause=[Pause("a", residency)])
    assert ran(t) == "b[8:14]", "c waits for b"
    assert ran(t) == "b@14 c[12:14]"


@pytest.mark.parametrize(("exact", "second"), [(True, ""), (False, " b[8:10]")])
def test_prompt_does_not_wait_for_unshareable_blocks(exact, second):
    """`a` has been in host memory: if that is not exact, its blocks are not shared."""
    t = twins(14, max_batch_tokens=8, host_blocks=8, exact_swaps=exact)
    assert ran(t) == "a[0:8]"
    t.plan(pause=[Pause("a", Residency.OFFLOAD)])
    t.plan(prefetch=["a"])
    t.arrive()
    t.prompt("b", 14)
    t.plan(admit=[Grant("a", 9), Grant("b", 9)])
    assert ran(t) == "a[8:14]" + second

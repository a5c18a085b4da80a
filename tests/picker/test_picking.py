"""Estimates, order and refusals, by tables worked by hand."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.picker.core.lines import MAX_RATIO, Line, LineFit, mean_line
from services.picker.core.picking import Ask, Cause, Load, estimate, rank, retry_after_s, shed

STEPS, PREFILL = Line(0.01, 0.001), Line(0.1, 0.0005)
ASK = Ask(prompt_tokens=200, output_tokens=100)


def load(address: str = "a", held=(), remaining=(), **fields) -> Load:
    given = {"steps": STEPS, "prefill": PREFILL, **fields}
    return Load(address, held, remaining, **given)


def test_estimate_at_an_idle_server_is_prefill_and_its_own_steps():
    found = estimate(ASK, load())
    assert found.wait_s == 0
    assert found.ttft_s == pytest.approx(0.1 + 200 * 0.0005)
    assert found.tpot_s == pytest.approx(0.011)
    assert found.latency_s == pytest.approx(0.2 + 100 * 0.011)
    assert found.added_s == 0


def test_estimate_counts_what_the_request_adds_to_others():
    found = estimate(ASK, load(held=[50, 50], remaining=[30, 400]))
    # 30 and 100 steps beside it are 1 ms longer, and both wait for its prefill
    assert found.added_s == pytest.approx(0.001 * (30 + 100) + 0.0005 * 200 * 2)
    assert found.tpot_s == pytest.approx(0.013)


def test_estimate_prefills_only_what_is_not_cached_and_what_is_ahead():
    found = estimate(ASK, load(cached_tokens=150, ahead_tokens=1_000))
    assert found.ttft_s == pytest.approx(0.1 + (1_000 + 50) * 0.0005)
    assert estimate(ASK, load(cached_tokens=900)).ttft_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("kv_tokens", "steps"),
    [
        (inf, 0),
        (550, 0),
        (549, 50),  # the shorter one must end
        (400, 50),
        (399, 200),  # the longer one, too
        (100, 200),  # it does not fit alone either: its server refuses it
    ],
)
def test_wait_lasts_until_the_memory_peak_fits(kv_tokens: float, steps: int):
    # Past-Future's peak with the request's 200 + 50, sorted by remaining tokens 200, 50, 50: when
    # the two short ones end they hold 100 + 100 + 200 + 3 · 50 = 550. Beside the longer one alone
    # the request ends at 100 + 200 + 2 · 50 = 400.
    ask = Ask(prompt_tokens=200, output_tokens=50)
    there = load(held=[100, 100], remaining=[200, 50], kv_tokens=kv_tokens)
    assert estimate(ask, there).wait_s == pytest.approx(steps * STEPS.at(2))


def test_wait_behind_a_queue_takes_one_end_for_each():
    there = load(held=[10] * 6, remaining=[60] * 6, waiting=4)
    assert estimate(ASK, there).wait_s == pytest.approx(4 / 2 * 60 * STEPS.at(6))
    assert estimate(ASK, load(waiting=4)).wait_s == 0  # older metrics than the last end


def test_a_faster_server_gets_requests_until_it_has_its_share():
    """Servers of three times the speed end up with about three times the requests."""
    fast, slow = Line(0.01, 0.001), Line(0.03, 0.003)
    counts = {"fast": 0, "slow": 0}
    for turn in range(80):
        estimates = [
            estimate(ASK, load(name, [300] * counts[name], [100] * counts[name], steps=steps))
            for name, steps in (("fast", fast), ("slow", slow))
        ]
        counts[rank(ASK, estimates, turn)[0].address] += 1
    assert 2 < counts["fast"] / counts["slow"] < 5


def test_rank_prefers_servers_that_meet_the_sla_and_takes_turns_among_equals():
    ask = replace(ASK, tpot_s=0.02)
    cheap = estimate(ask, load("busy", remaining=[1] * 15))  # 26 ms per token
    dear = estimate(ask, load("far", prefill=Line(9.0, 0.0)))
    assert cheap.cost_s < dear.cost_s
    assert [each.address for each in rank(ask, [cheap, dear], 0)] == ["far", "busy"]
    assert [each.address for each in rank(ASK, [cheap, dear], 0)] == ["busy", "far"]
    equal = [estimate(ASK, load(name)) for name in "abc"]
    assert [rank(ASK, equal, turn)[0].address for turn in range(4)] == ["a", "b", "c", "a"]


def test_shed_refuses_negative_priority_without_room_and_long_waits():
    full = estimate(ASK, load(held=[10] * 6, remaining=[60] * 6, waiting=4))  # 1.92 s
    idle = estimate(ASK, load())
    low = replace(ASK, priority=-1)
    refusal = shed(low, [full], 0.0)
    assert refusal is not None and (refusal.cause, refusal.retry_after_s) == (Cause.SHED, 2.0)
    assert shed(low, [full, idle], 0.0) is None
    assert shed(ASK, [full], 0.0) is None
    assert shed(ASK, [full], 1.0) is not None
    assert shed(ASK, [full], 5.0) is None
    late = shed(replace(low, ttft_s=0.01), [idle], 0.0)  # room, but not in time
    assert late is not None and late.cause is Cause.SHED
    assert [retry_after_s(wait) for wait in (0.0, 1.2, 900.0)] == [1.0, 2.0, 60.0]


def test_line_fit_finds_a_line_and_keeps_the_shape_of_the_prior_without_spread():
    fit = LineFit(spread=1e-9)
    assert not fit and fit.line(STEPS) == STEPS
    for x in (1, 5, 9, 3):
        fit.add(x, 0.5 + 0.25 * x)
    found = fit.line(STEPS)
    assert found.base == pytest.approx(0.5)
    assert found.slope == pytest.approx(0.25)
    one = LineFit(spread=16.0)
    for _ in range(3):
        one.add(4, 0.028)  # twice what STEPS has there
    assert one.line(STEPS).base == pytest.approx(0.02)
    assert one.line(STEPS).slope == pytest.approx(0.002)
    without_base = LineFit(spread=16.0)
    without_base.add(0, 4.0)
    assert without_base.line(Line(1e-17, 0.5)) == Line(4.0, 0.5 * MAX_RATIO)
    assert mean_line([], STEPS) == STEPS
    assert mean_line([Line(1, 3), Line(3, 5)], STEPS) == Line(2, 4)


samples = st.tuples(st.just(0.0) | st.floats(1e-9, 1e4), st.floats(0, 1e3), st.floats(0.01, 1))


@given(st.lists(samples, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_line_fit_is_never_negative(given_samples, base: float, slope: float):
    fit = LineFit(spread=16.0)
    for x, y, weight in given_samples:
        fit.add(x, y, weight)
    line = fit.line(Line(base, slope))
    assert line.base >= 0 and line.slope >= 0
    assert np.isfinite([line.base, line.slope]).all()

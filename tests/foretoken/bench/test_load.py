"""When requests are due, and how long they are to be."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.bench.lengths import parse_lengths
from foretoken.bench.load import ARRIVALS, Load, due_times_s

RATES = st.floats(0.1, 500)
HOW = st.sampled_from(sorted(ARRIVALS))


@given(
    RATES, st.sampled_from(sorted(ARRIVALS)), st.integers(0, 200), st.floats(0, 3), st.integers()
)
def test_due_times_ascend_within_both_limits(
    rate: float, arrivals: str, requests: int, seconds: float, seed: int
) -> None:
    if not (requests or seconds):
        with pytest.raises(ValueError, match="has no end"):
            Load(requests, seconds, rate, arrivals)
        return
    load = Load(requests, seconds, rate, arrivals)
    times = due_times_s(load, Random(seed))
    assert times == due_times_s(load, Random(seed))
    assert times[0] == 0 and times == sorted(times)
    assert not requests or len(times) <= requests
    assert not seconds or times[-1] < seconds
    if requests and not seconds:
        assert len(times) == requests == load.max_requests


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert due_times_s(Load(4, 0, 2.0, "constant"), Random(0)) == [0, 0.5, 1.0, 1.5]
    assert len(due_times_s(Load(0, 2.0, 4.0, "constant"), Random(0))) == 8


def test_poisson_gaps_have_the_right_mean_and_spread() -> None:
    times = due_times_s(Load(20_000, 0, 50.0), Random(1))
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.02, rel=0.03)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.06)


def test_unknown_arrival_process_is_rejected() -> None:
    with pytest.raises(ValueError, match="unknown arrivals 'bursty'; known: poisson, constant"):
        Load(arrivals="bursty")


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers())
def test_uniform_lengths_stay_within_the_range(low: int, more: int, seed: int) -> None:
    drawn = parse_lengths(f"{low}-{low + more}", "--x")(Random(seed))
    assert low <= drawn <= low + more
    assert parse_lengths(str(low), "--x")(Random(seed)) == low


def test_lognormal_lengths_have_their_median() -> None:
    draw, rng = parse_lengths("lognormal:100,0.8", "--x"), Random(2)
    drawn = sorted(draw(rng) for _ in range(4_001))
    assert drawn[2_000] == pytest.approx(100, rel=0.1) and drawn[0] >= 1


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "x", "4-2", "1-2-3", "lognormal:", "lognormal:5", "lognormal:0,1", "1e3"],
)
def test_invalid_length_is_a_one_line_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"--input-tokens: .* is not a length; use 128"):
        parse_lengths(text, "--input-tokens")

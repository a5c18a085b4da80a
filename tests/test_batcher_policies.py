"""Batching policies: hand-worked tables, the paper's example, and dumb oracles."""

from collections.abc import Sequence
from itertools import takewhile
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from services.batcher.group import Columns, Decision, GroupView, Params
from services.batcher.peak import PrefixPeaks, peak_tokens
from services.batcher.policies import PARAMS, POLICIES, resolve

from services.core import Wait
from services.forecast import Forecast, ForecastTable, certain

Row = tuple[int, int, int]  # prompt, generated, true length (= max_tokens)


def columns(rows: Sequence[tuple[int, int, int, int]]) -> Columns:
    table = np.array(rows, np.int64).reshape(-1, 4)
    return Columns(table[:, 0], table[:, 1], table[:, 2], table[:, 3])


def known(
    kv_tokens: int, running: Sequence[Row], queued: Sequence[Row], most: int = 99
) -> GroupView:
    """A group whose lengths are known: each forecast is certain of its request's length."""
    rows = [*running, *queued]
    numbered = [(*row, i) for i, row in enumerate(rows)]
    table = ForecastTable([certain(length) for _, _, length in rows])
    first = len(running)
    return GroupView(kv_tokens, most, columns(numbered[:first]), columns(numbered[first:]), table)


def decide(
    policy: str, view: GroupView, params: Params = MappingProxyType({}), seed: int = 0
) -> Decision:
    return POLICIES[policy](view, resolve(policy, params), np.random.default_rng(seed))


# The paper's example (papers/000 Fig. 6): capacity 21, two run, one waits. Admitted at t, memory
# would reach 22 at t+2; at t+1 it fits; at t+2 the first has ended and even the worst case fits.

CAPACITY = 21
AT_T = ([(2, 3, 5), (4, 3, 6)], [(4, 0, 3)])
AT_T1 = ([(2, 4, 5), (4, 4, 6)], [(4, 0, 3)])
AT_T2 = ([(4, 5, 6)], [(4, 0, 3)])


@pytest.mark.parametrize(
    ("policy", "params", "admitted"),
    [
        ("aggressive", {"watermark": 1.0}, [1, 1, 1]),
        ("past_future", {"reserved": 0.0}, [0, 1, 1]),
        ("conservative", {"overcommit": 1.0}, [0, 0, 1]),
    ],
)
def test_figure_6(policy: str, params: dict[str, float], admitted: list[int]) -> None:
    views = [known(CAPACITY, *moment) for moment in (AT_T, AT_T1, AT_T2)]
    assert [decide(policy, view, params).admit for view in views] == admitted


def test_figure_6_peaks() -> None:
    admitted_at_t = np.array([[5, 2], [7, 3], [4, 3]])
    assert peak_tokens(admitted_at_t[:, 0], admitted_at_t[:, 1]) == 22
    assert decide("past_future", known(CAPACITY, *AT_T1), {"reserved": 0}).peak_tokens == 21
    assert decide("past_future", known(CAPACITY, *AT_T), {"reserved": 0}) == Decision(
        0,
        16,
        Wait("the next one would need 22 tokens of KV cache in all, 21 of 21 may be planned"),
    )


@pytest.mark.parametrize(
    ("policy", "params", "admit", "peak"),
    [
        # Held: 10 run; the queue holds 10, 20, 30, 40 more.
        ("aggressive", {"watermark": 0.4}, 2, 40),
        ("aggressive", {"watermark": 0.39}, 1, 20),
        ("aggressive", {}, 3, 70),
        ("aggressive", {"watermark": 1.0}, 3, 70),
        # Prompt + max: 14 run; the queue would come to 30, 24, 34, 44.
        ("conservative", {"overcommit": 0.44}, 1, 44),
        ("conservative", {"overcommit": 0.43}, 0, 14),
        ("conservative", {}, 2, 68),
        ("conservative", {"overcommit": 1.5}, 4, 146),
        # Remaining: 4 run; then 20, 4, 4, 4. With the first two: max(30, 48, 44 + 12 …).
        ("past_future", {"reserved": 0.5}, 1, 30),
        ("past_future", {"reserved": 0.48}, 2, 52),
        ("past_future", {}, 3, 86),
        ("past_future", {"reserved": 0.0}, 3, 86),
    ],
)
def test_hand_worked_table(policy: str, params: dict[str, float], admit: int, peak: float) -> None:
    queue = [(10, 0, 20), (20, 0, 4), (30, 0, 4), (40, 0, 4)]
    decision = decide(policy, known(100, [(10, 0, 4)], queue), params)
    assert (decision.admit, decision.peak_tokens) == (admit, peak)
    assert (decision.wait is None) == (admit == 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_stops_at_the_first_that_does_not_fit(policy: str) -> None:
    queue = [(5, 0, 5), (900, 0, 5), (5, 0, 5)]
    assert decide(policy, known(100, [(5, 0, 5)], queue)).admit == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_max_running(policy: str) -> None:
    decision = decide(policy, known(1_000, [(1, 0, 1)] * 3, [(1, 0, 1)] * 5, most=5))
    assert decision.admit == 2
    assert decision.wait == Wait("5 requests run, the most this worker takes")
    assert decide(policy, known(1_000, [(1, 0, 1)] * 3, [(1, 0, 1)], most=2)).admit == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_admits_to_an_idle_worker_what_fits_alone(policy: str) -> None:
    longest, longer = (90, 0, 10), (90, 0, 11)
    tight: dict[str, float] = {
        "aggressive": {"watermark": 0.5},
        "conservative": {"overcommit": 0.5},
        "past_future": {"reserved": 0.5},
    }[policy]
    assert decide(policy, known(100, [], [longest, longest]), tight).admit == 1
    assert decide(policy, known(100, [], [longer]), tight).admit == 0
    assert decide(policy, known(100, [(1, 0, 1)], [longest]), tight).admit == 0
    assert decide(policy, known(100, [], [longest], most=0), tight).admit == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_waits_means_nothing_to_decide(policy: str) -> None:
    assert decide(policy, known(100, [], [])) == Decision(0, 0, None)
    assert decide(policy, known(100, [(5, 1, 9)], [])).wait is None


def test_resumed_requests_hold_what_they_had_generated() -> None:
    """An evicted request comes back with its tokens: they are recomputed, so they count."""
    queue = [(10, 30, 50), (10, 30, 50)]
    assert decide("aggressive", known(100, [(10, 0, 4)], queue)).peak_tokens == 90
    assert decide("conservative", known(150, [(10, 0, 4)], queue)).peak_tokens == 134
    assert decide("past_future", known(150, [(10, 0, 4)], queue)).peak_tokens == 120


def test_a_length_passed_means_max_tokens() -> None:
    """L̂ of a running request that outlived the forecast is its max_tokens."""
    table = ForecastTable([Forecast((5.0, 8.0), (0.5, 0.5), 8)])
    view = GroupView(1_000, 9, columns([(10, 8, 100, 0)]), columns([]), table)
    assert decide("past_future", view).peak_tokens == 110


def test_past_future_is_reproducible_and_follows_its_seed() -> None:
    table = ForecastTable([Forecast((10.0, 500.0), (0.5, 0.5), 500)])
    rows = columns([(10, 0, 500, 0)] * 20)
    view = GroupView(4_000, 64, rows, rows, table)
    again = [decide("past_future", view, seed=seed) for seed in (1, 1, 2, 3, 4)]
    assert again[0] == again[1]
    assert len({decision.peak_tokens for decision in again}) > 1


def test_past_future_admits_nobody_while_the_running_alone_are_too_many() -> None:
    """The queued add nothing to the peak: they end before the running one reaches it."""
    table = ForecastTable([Forecast((8.0,), (1.0,), 8), certain(3)])
    running, queued = columns([(10, 8, 1_024, 0)]), columns([(5, 0, 3, 1)] * 2)
    view = GroupView(1_000, 64, running, queued, table)
    assert decide("past_future", view).admit == 0


def test_small_batches_are_drawn_several_times() -> None:
    """One running request, half of the time 10 and half 500 long: a mean of draws, not one."""
    table = ForecastTable([Forecast((10.0, 500.0), (0.5, 0.5), 500)])
    view = GroupView(4_000, 64, columns([(10, 0, 500, 0)]), columns([]), table)
    peaks = [decide("past_future", view, seed=seed).peak_tokens for seed in range(1_000)]
    assert set(peaks) <= {20 + 490 * k / 5 for k in range(6)}
    assert np.mean(peaks) == pytest.approx(265, abs=20)


# Dumb oracles

held_and_left = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def simulate(requests: Sequence[tuple[int, int]]) -> int:
    """Grow everybody by a token a step, free who has ended, remember the most that was held."""
    alive, most = list(requests), sum(held for held, _ in requests)
    while alive := [(held, left) for held, left in alive if left > 0]:
        alive = [(held + 1, left - 1) for held, left in alive]
        most = max(most, sum(held for held, _ in alive))
    return most


@settings(max_examples=300)
@given(held_and_left)
def test_peak_equals_a_simulated_future(requests: list[tuple[int, int]]) -> None:
    held, left = np.array(requests, np.int64).reshape(-1, 2).T
    assert peak_tokens(held, left) == simulate(requests)


@settings(max_examples=200)
@given(held_and_left, held_and_left, st.integers(0, 2**32))
def test_prefix_peaks_equal_the_mean_of_simulated_futures(
    running: list[tuple[int, int]], queued: list[tuple[int, int]], seed: int
) -> None:
    rows = [*running, *queued]
    rng = np.random.default_rng(seed)
    futures = rng.integers(0, 60, (3, len(rows)))
    held = np.array([h for h, _ in rows], np.int64)
    peaks = PrefixPeaks(len(running), held, futures.astype(float))
    seen = []
    for k in range(len(queued) + 1):
        n = len(running) + k
        each = [simulate(list(zip(held[:n], future[:n], strict=True))) for future in futures]
        assert peaks(k) == pytest.approx(np.mean(each))
        seen.append(peaks(k))
    assert seen == sorted(seen)


row = st.tuples(st.integers(1, 40), st.integers(0, 20), st.integers(1, 60)).map(
    lambda r: (r[0], r[1], r[1] + r[2])
)


@settings(max_examples=300)
@given(
    st.integers(1, 600),
    st.lists(row, max_size=6),
    st.lists(row, max_size=40),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.05, 0.3]),
)
def test_past_future_admits_what_a_linear_scan_admits(
    kv_tokens: int, running: list[Row], queued: list[Row], most: int, reserved: float
) -> None:
    limit = (1 - reserved) * kv_tokens

    def peak(k: int) -> int:
        return simulate([(p + g, length - g) for p, g, length in [*running, *queued[:k]]])

    room = range(1, min(len(queued), max(0, most - len(running))) + 1)
    scanned = len(list(takewhile(lambda k: peak(k) <= limit, room)))
    if not scanned and not running and room and queued[0][0] + queued[0][2] <= kv_tokens:
        scanned = 1
    decision = decide(
        "past_future", known(kv_tokens, running, queued, most), {"reserved": reserved}
    )
    assert decision.admit == scanned
    assert decision.peak_tokens == pytest.approx(peak(scanned))


@settings(max_examples=100)
@given(st.integers(200, 20_000), st.integers(0, 20), st.integers(0, 200), st.integers(0, 2**32))
def test_search_agrees_with_a_scan_over_drawn_futures(
    kv_tokens: int, running: int, queued: int, seed: int
) -> None:
    """With uncertain lengths the peaks rise in uneven steps; the search must not be misled."""
    rng = np.random.default_rng(seed)
    rows = np.column_stack(
        [
            rng.integers(1, 300, running + queued),
            np.zeros(running + queued, np.int64),
            np.full(running + queued, 900),
            rng.integers(0, 2, running + queued),
        ]
    )
    table = ForecastTable([Forecast((5.0, 800.0), (0.7, 0.3), 800), certain(60)])
    view = GroupView(
        kv_tokens, 300, columns(rows[:running].tolist()), columns(rows[running:].tolist()), table
    )
    decision = decide("past_future", view, {"reserved": 0}, seed)
    assert 0 <= decision.admit <= queued
    idle_exception = running == 0 and decision.admit == 1
    if decision.admit and not idle_exception:
        assert decision.peak_tokens <= kv_tokens
    if decision.wait and decision.admit + running < 300:
        needed = float(decision.wait.reason.split("need ")[1].split(" ")[0])
        assert needed >= kv_tokens - 0.5


def test_parameters_have_defaults_bounds_and_names() -> None:
    assert PARAMS.keys() == POLICIES.keys()
    assert resolve("past_future", {}) == {"reserved": 0.05}
    assert resolve("conservative", {"overcommit": 1.25}) == {"overcommit": 1.25}
    for policy, given_params, sentence in (
        ("fifo", {}, "no policy is called 'fifo'; known: aggressive, conservative, past_future"),
        ("aggressive", {"reserved": 0.1}, "no parameter 'reserved'; known: watermark"),
        ("past_future", {"reserved": 1.5}, r"past_future.reserved must lie in \[0, 1\], got 1.5"),
        ("past_future", {"reserved": float("nan")}, "got nan"),
    ):
        with pytest.raises(ValueError, match=sentence):
            resolve(policy, given_params)

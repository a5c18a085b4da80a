"""Forming policies: worked examples, and the example of the Past-Future paper."""

from collections.abc import Sequence

import numpy as np
import pytest

from services.forecast import Forecast, certain
from services.policies.decision import WaitReason
from services.policies.form.demand import Demand
from services.policies.form.past_future import PeakDemand
from services.policies.form.registry import FORMS
from services.policies.parameters import resolve
from services.policies.preset import choose
from tests.policies.form.peak_oracle import peak_tokens
from tests.policies.made_snapshots import (
    Row,
    count_fitting,
    demanded,
    fill_queue,
    formed,
    jobs,
    node,
    table,
)

# Past-Future, Fig. 6: capacity 21, two requests run, one waits. Admitted at t,
# memory would reach 22 at t+2; at t+1 it fits; at t+2 the first request has ended and even the
# worst case fits.

CAPACITY = 21
AT_T: tuple[list[Row], list[Row]] = ([(2, 3, 5), (4, 3, 6)], [(4, 0, 3)])
AT_T1: tuple[list[Row], list[Row]] = ([(2, 4, 5), (4, 4, 6)], [(4, 0, 3)])
AT_T2: tuple[list[Row], list[Row]] = ([(4, 5, 6)], [(4, 0, 3)])


@pytest.mark.parametrize(
    ("form", "params", "admitted"),
    [
        ("aggressive", {"watermark": 1.0}, [1, 1, 1]),
        ("past_future", {"reserved": 0.0}, [0, 1, 1]),
        ("conservative", {"overcommit": 1.0}, [0, 0, 1]),
        ("fixed", {"batch_size": 3}, [0, 0, 1]),
        ("curve", {"reserved": 0.0, "z": 2.0}, [0, 1, 1]),
    ],
)
def test_forms_match_past_future_figure_6(
    form: str, params: dict[str, float], admitted: list[int]
) -> None:
    moments = (AT_T, AT_T1, AT_T2)
    assert [formed(form, CAPACITY, *moment, params)[0] for moment in moments] == admitted


def test_peaks_match_past_future_figure_6() -> None:
    admitted_at_t = np.array([[5, 2], [7, 3], [4, 3]])
    assert peak_tokens(admitted_at_t[:, 0], admitted_at_t[:, 1]) == 22
    assert formed("past_future", CAPACITY, *AT_T1, {"reserved": 0})[1].peaks[0] == 21
    admit, filled = formed("past_future", CAPACITY, *AT_T, {"reserved": 0})
    assert (admit, filled.peaks[0]) == (0, 16)
    assert (filled.reasons[2], filled.first_values[2], filled.second_values[2]) == (
        WaitReason.MEMORY,
        22,
        21,
    )


@pytest.mark.parametrize(
    ("form", "params", "admit", "peak"),
    [
        # Held: the running request 10; the queue adds 10, 20, 30, 40.
        ("aggressive", {"watermark": 0.4}, 2, 40),
        ("aggressive", {"watermark": 0.39}, 1, 20),
        ("aggressive", {}, 3, 70),
        ("aggressive", {"watermark": 1.0}, 3, 70),
        # Prompt + cap: the running request 14; the queue adds 30, 24, 34, 44.
        ("conservative", {"overcommit": 0.44}, 1, 44),
        ("conservative", {"overcommit": 0.43}, 0, 14),
        ("conservative", {}, 2, 68),
        ("conservative", {"overcommit": 1.5}, 4, 146),
        # Remaining: the running request 4; then 20, 4, 4, 4. With the first two: max(30, 48, 44 +
        # 12 …).
        ("past_future", {"reserved": 0.5}, 1, 30),
        ("past_future", {"reserved": 0.48}, 2, 52),
        ("past_future", {}, 3, 86),
        ("past_future", {"reserved": 0.0}, 3, 86),
        ("past_future", {"reserved": 0.48, "draws": 7, "statistic": 1}, 2, 52),
        # Lengths are certain here, so z has no effect.
        ("curve", {"reserved": 0.5, "z": 3.0}, 1, 30),
        ("curve", {"reserved": 0.48}, 2, 52),
        ("curve", {}, 3, 86),
        # The worst case as above, at most three admissions beside the running request.
        ("fixed", {"batch_size": 4}, 2, 68),
        # Slices are whole: the worst case again, of 0.9 or 0.43 of memory.
        ("sliced", {}, 2, 68),
        ("sliced", {"zeta": 0.43}, 0, 14),
        ("token_budget", {}, 3, 70),
    ],
)
def test_forms_match_worked_examples(
    form: str, params: dict[str, float], admit: int, peak: float
) -> None:
    queue = [(10, 0, 20), (20, 0, 4), (30, 0, 4), (40, 0, 4)]
    came, filled = formed(form, 100, [(10, 0, 4)], queue, params)
    assert (came, filled.peaks[0]) == (admit, peak)
    reasons = [WaitReason.ADMITTED] * admit + [WaitReason.MEMORY] + [WaitReason.BLOCKED] * 3
    assert list(filled.reasons[1:]) == reasons[:4]


@pytest.mark.parametrize("form", FORMS)
def test_form_stops_at_first_request_that_does_not_fit(form: str) -> None:
    assert formed(form, 100, [(5, 0, 5)], [(5, 0, 5), (900, 0, 5), (5, 0, 5)])[0] == 1


@pytest.mark.parametrize("form", FORMS)
def test_form_respects_slots(form: str) -> None:
    admit, filled = formed(form, 1_000, [(1, 0, 1)] * 3, [(1, 0, 1)] * 5, most=5)
    assert admit == 2
    assert (filled.reasons[5], filled.first_values[5], filled.second_values[5]) == (
        WaitReason.SLOTS,
        5,
        5,
    )
    assert formed(form, 1_000, [(1, 0, 1)] * 3, [(1, 0, 1)], most=2)[0] == 0


TIGHT: dict[str, dict[str, float]] = {
    "aggressive": {"watermark": 0.5},
    "conservative": {"overcommit": 0.5},
    "past_future": {"reserved": 0.5},
    "fixed": {"batch_size": 1},
    "sliced": {"zeta": 0.5},
    "token_budget": {"watermark": 0.5, "budget_tokens": 1},
    "curve": {"reserved": 0.5},
}


@pytest.mark.parametrize("form", FORMS)
def test_idle_worker_admits_request_that_fits_alone(form: str) -> None:
    longest, longer = (90, 0, 10), (90, 0, 11)
    tight = TIGHT[form]
    assert formed(form, 100, [], [longest, longest], tight)[0] == 1
    assert formed(form, 100, [], [longer], tight)[0] == 0
    assert formed(form, 100, [(1, 0, 1)], [longest], tight)[0] == 0
    assert formed(form, 100, [], [longest], tight, most=0)[0] == 0


@pytest.mark.parametrize(
    ("form", "needed"),
    [
        ("aggressive", 120),
        ("conservative", 140),
        ("past_future", 140),
        ("curve", 140),
        ("sliced", 140),
    ],
)
def test_memory_reason_counts_request_admitted_alone(form: str, needed: float) -> None:
    """Each request holds 60 tokens and generates 10; the reason counts both, not only the admitted
    one."""
    _, filled = formed(form, 100, [], [(60, 0, 10), (60, 0, 10)], TIGHT[form])
    assert (filled.reasons[1], filled.first_values[1]) == (WaitReason.MEMORY, needed)


@pytest.mark.parametrize("form", FORMS)
def test_form_keeps_running_requests_when_queue_is_empty(form: str) -> None:
    assert formed(form, 100, [], [])[0] == 0
    assert formed(form, 100, [(5, 1, 9)], [])[1].runs_next.tolist() == [True]


def test_resumed_requests_count_generated_tokens() -> None:
    """An evicted request recomputes its generated tokens, so they count."""
    queue = [(10, 30, 50), (10, 30, 50)]
    assert formed("aggressive", 100, [(10, 0, 4)], queue)[1].peaks[0] == 90
    assert formed("conservative", 150, [(10, 0, 4)], queue)[1].peaks[0] == 134
    assert formed("past_future", 150, [(10, 0, 4)], queue)[1].peaks[0] == 120


def held(form: str, **columns: Sequence[int]) -> list[float]:
    """Return the tokens each request holds, in blocks of 16."""
    count = len(next(iter(columns.values())))
    made, worker = jobs(count, **columns), node(block_tokens=16)
    return list(demanded(form, made, worker, table(certain(99)), {}).held)


def test_forms_count_whole_blocks_and_reported_blocks() -> None:
    line = {"prompt": [16, 17, 5], "output": [0, 0, 3], "cap": [16, 16, 4]}
    assert held("aggressive", **line) == [16, 32, 16]
    assert held("aggressive", **line, blocks=[3, 1, 0]) == [48, 32, 16]
    assert held("past_future", **line, blocks=[3, 1, 0]) == [48, 32, 16]
    assert held("conservative", **line, blocks=[3, 1, 0]) == [32, 48, 16]
    assert held("fixed", **line, blocks=[3, 1, 0]) == [32, 48, 16]
    assert held("sliced", **line, blocks=[3, 1, 0]) == [48, 48, 16]
    assert held("token_budget", **line, blocks=[3, 1, 0]) == [48, 32, 16]
    assert held("curve", **line, blocks=[3, 1, 0]) == [48, 32, 16]


@pytest.mark.parametrize(
    ("form", "limit"),
    [
        ("aggressive", 0.95),
        ("conservative", 1.0),
        ("past_future", 0.95),
        ("fixed", 1.0),
        ("sliced", 0.9),
        ("token_budget", 0.95),
        ("curve", 1.0),
    ],
)
def test_shared_blocks_raise_limit(form: str, limit: float) -> None:
    worker = node(kv_tokens=1_000, block_tokens=10, shared_blocks=20)
    demand = demanded(form, jobs(1), worker, table(certain(9)), {})
    assert demand.limits[0] == pytest.approx(limit * 1_200)


def planned(
    forecast: Forecast, prompt: int, output: int, cap: int, count: int, seed: int = 0
) -> Demand:
    """Return the demand of Past-Future for `count` equal requests."""
    plain = {"prompt": [prompt] * count, "output": [output] * count, "cap": [cap] * count}
    made = jobs(count, **plain)
    return demanded("past_future", made, node(), table(forecast), {"reserved": 0.05}, seed)


def peak(demand: Demand) -> float:
    count = len(demand.held)
    return count_fitting(demand, range(count), count, 0)[1](0)


def test_request_beyond_forecast_is_expected_to_reach_max_tokens() -> None:
    """L̂ of a running request beyond its forecast is its max_tokens."""
    assert peak(planned(Forecast((5.0, 8.0), (0.5, 0.5), 8), 10, 8, 100, 1)) == 110


def test_request_beyond_cap_has_no_remaining_tokens() -> None:
    assert peak(planned(certain(8), 10, 30, 20, 1)) == 40


def test_past_future_is_determined_by_seed() -> None:
    forecast = Forecast((10.0, 500.0), (0.5, 0.5), 500)
    again = [peak(planned(forecast, 10, 0, 500, 20, seed)) for seed in (1, 1, 2, 3, 4)]
    assert again[0] == again[1]
    assert len(set(again)) > 1


def test_past_future_admits_nothing_while_running_peak_exceeds_limit() -> None:
    """The queued requests do not raise the peak: they end before the running one reaches it."""
    running, queued = [(10, 8, 1_024)], [(5, 0, 3)] * 2
    assert formed("past_future", 1_000, running, queued)[0] == 0


def test_past_future_averages_several_draws_for_small_batches() -> None:
    """One running request has length 10 or 500, each with probability ½; the peak is the mean of 5
    draws."""
    forecast = Forecast((10.0, 500.0), (0.5, 0.5), 500)
    peaks = [peak(planned(forecast, 10, 0, 500, 1, seed)) for seed in range(1_000)]
    assert set(peaks) <= {20 + 490 * k / 5 for k in range(6)}
    assert np.mean(peaks) == pytest.approx(265, abs=20)


def test_past_future_applies_draws_and_statistic() -> None:
    """One request has length 10 or 500, each with probability ½. Of 64 draws at least one is long,
    except with probability 2⁻⁶⁴: the largest needs 510, the mean is unchanged."""
    made, worker = jobs(1, prompt=[10], cap=[500]), node()
    forecasts = table(Forecast((10.0, 500.0), (0.5, 0.5), 500))
    often = {"draws": 64}
    drawn = demanded("past_future", made, worker, forecasts, often)
    assert isinstance(drawn, PeakDemand)
    (lengths,) = drawn.remaining
    assert lengths.shape == (64, 1)
    assert peak(drawn) == pytest.approx(float(lengths.mean()) + 10)
    assert 200 < peak(drawn) < 400
    assert peak(demanded("past_future", made, worker, forecasts, often | {"statistic": 1})) == 510
    row = choose("past-future", {"statistic": "largest", "draws": 3})
    assert (row.params["statistic"], row.params["draws"]) == (1, 3)


def test_fixed_form_respects_batch_size() -> None:
    """One request runs; of four waiting, two are admitted, and the next reports a batch of
    three."""
    came, reported = formed("fixed", 1_000, [(5, 0, 5)], [(5, 0, 5)] * 4, {"batch_size": 3})
    assert came == 2
    assert (reported.reasons[3], reported.first_values[3], reported.second_values[3]) == (
        WaitReason.SLOTS,
        3,
        3,
    )
    assert formed("fixed", 1_000, [(5, 0, 5)] * 4, [(5, 0, 5)], {"batch_size": 3})[0] == 0
    assert formed("fixed", 25, [(5, 0, 5)], [(5, 0, 5)] * 4, {"batch_size": 3})[0] == 1


def test_token_budget_limits_tokens_per_step() -> None:
    """Two requests decode at 1 token each, and one has 30 prompt tokens left: 32 of 50 tokens. A
    prompt of 60 gets the remaining 18 for its first chunk. None is left for the next, which would
    raise the total to 97."""
    made = jobs(
        5,
        prompt=[20, 20, 40, 60, 5],
        output=[3, 1, 0, 0, 0],
        held=[22, 20, 10, 0, 0],
        cap=[50] * 5,
    )
    runs = np.arange(5) < 3
    worker, forecasts = node(), table(certain(50))
    demand = demanded("token_budget", made, worker, forecasts, {"budget_tokens": 50}, 0, runs)
    reported = fill_queue(runs, demand, 99, alone=True)
    assert reported.runs_next.tolist() == [True, True, True, True, False]
    assert (reported.reasons[4], reported.first_values[4], reported.second_values[4]) == (
        WaitReason.STEP_BUDGET,
        97,
        50,
    )
    full = demanded("token_budget", made, worker, forecasts, {"budget_tokens": 32}, 0, runs)
    reported = fill_queue(runs, full, 99, alone=True)
    assert reported.runs_next.tolist() == [True, True, True, False, False]
    assert (reported.reasons[3], reported.first_values[3], reported.second_values[3]) == (
        WaitReason.STEP_BUDGET,
        92,
        32,
    )
    small = demanded("token_budget", made, node(kv_tokens=150), forecasts, {}, 0, runs)
    reported = fill_queue(runs, small, 99, alone=True)
    held = 23 + 21 + 40 + 60
    assert (reported.reasons[3], reported.first_values[3], reported.second_values[3]) == (
        WaitReason.MEMORY,
        held,
        0.95 * 150,
    )


def test_form_parameters_have_defaults_bounds_and_names() -> None:
    past_future = {"reserved": 0.05, "draws": 0, "statistic": 0}
    assert resolve("f", FORMS["past_future"].params, {}) == past_future
    assert resolve("f", FORMS["conservative"].params, {"overcommit": 1.25}) == {"overcommit": 1.25}
    for form, given_params, sentence in (
        ("aggressive", {"reserved": 0.1}, "no parameter 'reserved'; known: watermark"),
        ("past_future", {"reserved": 1.5}, r"f.reserved must lie in \[0, 1\], got 1.5"),
        ("past_future", {"reserved": float("nan")}, "got nan"),
    ):
        with pytest.raises(ValueError, match=sentence):
            resolve("f", FORMS[form].params, given_params)

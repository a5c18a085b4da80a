"""The predictor `given`, and runs that end early."""

from dataclasses import replace

import numpy as np
import pytest

from services.forecast import UNCAPPED, Forecast
from services.policies.preset import choose
from simulator.engine.given import known_lengths
from simulator.engine.simulation import simulate
from tests.simulator.fixtures import BY_HAND, INSTANT, SMALL, settings, workload

ONE_AT_A_TIME = replace(SMALL, cost=BY_HAND, max_running=1)
BURST = workload([(0.0, 4, 30), (0.0, 4, 20), (0.0, 4, 10)])


def order(forecast_tokens: list[int], stop_after: int = 0) -> list[int]:
    """The requests in the order in which they end, in turn on one worker."""
    shortest = choose("ltr", {"threshold": 1e9})
    given = replace(BURST, forecast_tokens=forecast_tokens)
    one = settings(shortest, ONE_AT_A_TIME, timing=INSTANT)
    records = simulate(replace(one, predictor="given", stop_after=stop_after), given).records
    ended = [row for row in range(len(BURST)) if records.finished[row]]
    return sorted(ended, key=lambda row: records.last_s[row])


def test_given_forecasts_decide_the_order_in_place_of_the_lengths():
    assert order([30, 20, 10]) == [2, 1, 0]
    assert order([10, 30, 20]) == [0, 2, 1]


def test_given_distributions_decide_the_order_by_their_means():
    forecasts = [Forecast((5.0, tokens), (0.5, 0.5), UNCAPPED) for tokens in (60.0, 40.0, 20.0)]
    shortest = choose("ltr", {"threshold": 1e9})
    given = replace(BURST, forecasts=forecasts)
    one = replace(settings(shortest, ONE_AT_A_TIME, timing=INSTANT), predictor="given")
    last_s = simulate(one, given).records.last_s
    assert sorted(range(3), key=lambda row: last_s[row]) == [2, 1, 0]
    assert given.take(np.array([1])).forecasts == [forecasts[1]]


def test_run_ends_after_the_number_of_requests_asked():
    assert order([10, 30, 20], stop_after=2) == [0, 2]


def test_given_without_forecasts_is_an_error():
    with pytest.raises(ValueError, match="the predictor 'given' answers a workload's own"):
        simulate(replace(settings("fcfs"), predictor="given"), BURST)
    with pytest.raises(ValueError, match=r"the columns have \[2, 3\] rows"):
        replace(BURST, forecast_tokens=[1, 2])
    assert known_lengths(int, "given").forecast([]) == []

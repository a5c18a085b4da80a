"""A real Prometheus over all catalogued metrics: each has its type, and queries return data."""

import time
from collections.abc import Iterator

import pytest

from tests.observability.prometheus.checks import (
    ALL,
    every_query,
    failing_rules,
    mistyped,
    uncounted,
    variables_without_values,
    without_data,
)
from tests.observability.prometheus.driver import Prometheus, scraping
from tests.observability.prometheus.made_exposition import exposing

WATCHED_S = 8.0


@pytest.fixture(scope="module")
def made(prometheus_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("made")
    with exposing() as address, scraping(prometheus_program, address, folder) as prometheus:
        time.sleep(WATCHED_S)
        yield prometheus


@pytest.mark.slow
def test_prometheus_sees_every_metric_with_its_type(made: Prometheus):
    assert mistyped(made, ALL) == {}


@pytest.mark.slow
def test_prometheus_queries_return_data(made: Prometheus):
    assert without_data(made, every_query()) == []


@pytest.mark.slow
def test_prometheus_evaluates_rules_and_variables(made: Prometheus):
    assert failing_rules(made) == []
    assert variables_without_values(made) == []


@pytest.mark.slow
def test_unknown_metric_returns_no_data(made: Prometheus):
    assert made.samples("sum(foretoken_made_up_total)") == []
    with pytest.raises(AssertionError, match="parse error"):
        made.samples("sum(")


def test_zero_is_distinguished_from_missing():
    text = (
        "# TYPE foretoken_goodput_tokens_total counter\n"
        'foretoken_goodput_tokens_total{class="batch"} 0.0\n'
        "# TYPE foretoken_generation_tokens_total counter\n"
        "foretoken_generation_tokens_total 3.0\n"
        "# TYPE foretoken_num_requests_waiting gauge\n"
        "foretoken_num_requests_waiting 0.0\n"
        "# TYPE foretoken_predictor_tau gauge\n"
        "foretoken_predictor_tau NaN\n"
    )
    counted = {metric.name for metric in ALL - uncounted(text)}
    assert counted == {"generation_tokens", "num_requests_waiting"}

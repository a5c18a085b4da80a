"""A real Prometheus over a loaded system: metrics, labels and queries match what is exposed."""

import asyncio
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from observability.metrics import batcher, estimator, gateway, picker, predictor, scheduler, worker
from observability.metrics.metric import Metric
from tests.live import Live, serving
from tests.observability.live.load import ARGUMENTS, load
from tests.observability.prometheus.checks import (
    ALL,
    every_query,
    failing_rules,
    label_samples,
    mistyped,
    uncounted,
    variables_without_values,
    without_data,
)
from tests.observability.prometheus.driver import Prometheus, scraping
from tests.observability.prometheus.emitted import values
from tests.observability.prometheus.queries import Query

LOADED_S = 20.0
pytestmark = pytest.mark.slow

# Metrics that this load does not change, by reason.
STATIC_BATCHES: set[Metric] = {
    estimator.BATCHES, estimator.BATCH_ERROR, worker.PADDING, worker.PADDING_LEFT_OUT,
    worker.INVALID,
}  # fmt: skip
OVERLAP: set[Metric] = {worker.STRAY}  # a step ahead is computed on a GPU
FAULTS: set[Metric] = {  # no process is lost, and no queue overflows
    gateway.RESUBMISSIONS, gateway.ANNOUNCEMENTS, scheduler.WORKERS_LOST, scheduler.ADVICE_DROPPED,
    scheduler.SUSPECTED, scheduler.INVALID, scheduler.DISPLACED, scheduler.QUARANTINED,
    predictor.FALLBACKS, predictor.UNREAD_DROPPED, predictor.IMPROVED_DROPPED,
    predictor.OUTCOMES_IMPLAUSIBLE, gateway.INVALID_MESSAGES, worker.INVALID_MESSAGES,
    predictor.INVALID, estimator.INVALID, batcher.INVALID,
    predictor.PENDING_DROPPED, predictor.LOG_DROPPED, predictor.LOG_UNREADABLE,
    predictor.LOG_FROM_FUTURE, worker.KV_EVENTS_DROPPED,
}  # fmt: skip
NO_BATCHER: set[Metric] = {
    *batcher.ALL,
    scheduler.ARRANGED,
}  # only --separate has a batcher process
NO_PICKER: set[Metric] = set(picker.ALL)  # `foretoken serve` starts none
NO_REDIS: set[Metric] = {scheduler.LEADER_CHANGES, gateway.LIMITS_SHARED}
NO_ADAPTERS: set[Metric] = {
    worker.ADAPTERS, worker.ADAPTER_BYTES, worker.ADAPTER_COPIES, worker.ADAPTER_COPY_S,
    worker.ADAPTER_REQUESTS, gateway.ADAPTERS,
}  # fmt: skip
EXCUSED = STATIC_BATCHES | OVERLAP | FAULTS | NO_PICKER | NO_REDIS | NO_ADAPTERS


@dataclass(frozen=True)
class Loaded:
    """A system after its load, and the Prometheus that scraped it."""

    live: Live
    prometheus: Prometheus
    exposed: set[Metric]  # by its processes
    excused: set[Metric]  # that the load need not change


@pytest.fixture(scope="module", params=["default", "separate"])
def loaded(
    request: pytest.FixtureRequest,
    prometheus_program: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Loaded]:
    separate = request.param == "separate"
    folder = tmp_path_factory.mktemp(request.param)
    with (
        serving(*ARGUMENTS, *(["--separate"] if separate else [])) as live,
        scraping(prometheus_program, urlsplit(live.http).netloc, folder) as prometheus,
    ):
        excused = EXCUSED if separate else EXCUSED | NO_BATCHER
        queries = answerable(excused)

        def has_all() -> bool:
            return uncounted(exposition(live)) <= excused and not without_data(prometheus, queries)

        asyncio.run(load(live, LOADED_S, has_all))
        absent = NO_PICKER if separate else NO_PICKER | set(batcher.ALL)
        yield Loaded(live, prometheus, ALL - absent, excused)


def answerable(excused: set[Metric]) -> list[Query]:
    """All queries without excused metrics."""
    return [each for each in every_query() if not each.metrics() & excused]


def exposition(live: Live) -> str:
    with urllib.request.urlopen(f"{live.http}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def test_live_stack_exports_every_metric_with_its_type(loaded: Loaded):
    assert mistyped(loaded.prometheus, loaded.exposed) == {}


def test_live_load_changes_every_metric_except_listed_ones(loaded: Loaded):
    silent = uncounted(exposition(loaded.live))
    assert {metric.name for metric in silent - loaded.excused} == set()


def test_live_queries_return_data(loaded: Loaded):
    assert without_data(loaded.prometheus, answerable(loaded.excused)) == []


def test_live_labels_have_known_values(loaded: Loaded):
    known = values()
    unknown = {
        (metric.name, label, value)
        for metric, label, value in label_samples(exposition(loaded.live))
        if value not in known[metric, label]
    }
    assert unknown == set()


def test_live_rules_and_variables_have_values(loaded: Loaded):
    assert failing_rules(loaded.prometheus) == []
    assert variables_without_values(loaded.prometheus) == []


def test_live_families_are_unique_without_created_series(loaded: Loaded):
    text = exposition(loaded.live)
    declared = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(declared) == len(set(declared))
    assert "_created" not in text

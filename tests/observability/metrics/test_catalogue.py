"""The catalogue: rules for all metrics, and the generated reference page."""

import re
from collections import Counter

import pytest

from gateway.config import GatewayConfig
from observability.catalogue_page import PAGE, page
from observability.metrics.catalogue import CATALOGUE, PROCESS_LABELS
from observability.metrics.metric import Kind, Metric
from observability.metrics.vllm import ALIASES, SAME
from services.batcher.config import BatcherConfig
from services.estimator.config import EstimatorConfig
from services.picker.config import PickerConfig
from services.predictor.config import PredictorConfig
from services.runtime.config import load
from services.runtime.main import ServedSettings
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig

EVERY = [metric for metrics in CATALOGUE.values() for metric in metrics]
CONFIGS: tuple[type[ServedSettings], ...] = (
    GatewayConfig, SchedulerConfig, PredictorConfig, EstimatorConfig, BatcherConfig, WorkerConfig,
    PickerConfig,
)  # fmt: skip


@pytest.mark.parametrize("metric", EVERY, ids=lambda metric: metric.name)
def test_every_metric_follows_the_naming_rules(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_created"))
    assert metric.help.endswith(".") and "|" not in metric.help and "\n" not in metric.help
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in metric.labels)
    assert not {"le", "request_id", "id"}.intersection(metric.labels)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)


def test_metric_names_are_unique_to_a_service() -> None:
    assert [name for name, n in Counter(metric.name for metric in EVERY).items() if n > 1] == []


def test_process_labels_equal_the_config_s() -> None:
    for kind in CONFIGS:
        labels = load(kind, {"address": "unix:/none"}).metric_labels
        assert tuple(labels) == PROCESS_LABELS.get(kind.section, ())
        assert all(labels.values())
    for service, metrics in CATALOGUE.items():
        for metric in metrics:
            assert not set(metric.labels).intersection(PROCESS_LABELS.get(service, ()))


def test_vllm_names_map_to_one_metric() -> None:
    assert len(set(ALIASES.values())) == len(ALIASES)
    assert {metric.name for metric in EVERY} >= SAME
    times = [metric for metric in EVERY if metric.name in SAME and metric.buckets]
    assert all(metric.buckets[0] <= 0.001 for metric in times)


def test_reference_page_is_current() -> None:
    assert PAGE.read_text() == page(), "make metrics"
    reported = set(re.findall(r"^\| `(\w+)`", page(), re.MULTILINE))
    assert reported == {metric.family for metric in EVERY}

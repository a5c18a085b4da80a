"""The values of each label of the catalogue's metrics, as services emit them.

Most values exist from the start of a service: its metrics are created and read. The rest are
constants of the components that count them.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache

from prometheus_client import CollectorRegistry

from gateway.config import SLA_CLASSES
from gateway.metrics import MET, MISSED, Metrics
from gateway.types.sla_classes import OTHER
from observability.metrics import gateway, predictor, scheduler, worker
from observability.metrics.catalogue import CATALOGUE
from observability.metrics.metric import Metric
from observability.prometheus.promql import labels_of
from services.batcher.metrics import BatcherMetrics
from services.costs import CostModel
from services.estimator.metrics import EstimatorMetrics
from services.picker.metrics import PickerMetrics
from services.policies.preset import DEFAULT, choose, presets
from services.predictor.learning.scorecard import ScorecardSummary
from services.predictor.metrics import PredictorMetrics
from services.predictor.predictors import PREDICTORS
from services.runtime.network.breaker import BreakerPhase
from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.metrics import SchedulerMetrics
from services.worker.engine.phase_clock import PhaseClock
from services.worker.metrics import WorkerMetrics
from services.worker.requests.state import WorkerState
from services.worker.requests.types.limits import Limits

Values = Mapping[tuple[Metric, str], frozenset[str]]

# Labels of the deployment, for all metrics.
DEPLOYMENT = {
    "model_name": ("demo",),
    "worker": ("worker-0", "worker-1"),
    "class": (*SLA_CLASSES, OTHER),
    "preset": tuple(presets()),
    "endpoint": ("10.0.0.1:8000", "10.0.0.2:8000"),
}
YES_NO = ("yes", "no")
# Values that first appear with the event.
EVENTS: Mapping[tuple[Metric, str], tuple[str, ...]] = {
    (gateway.CLIENT_FORECASTS, "covered"): YES_NO,
    (gateway.TTFT_PROMISES, "kept"): YES_NO,
    (gateway.SLA_FORECASTS, "foreseen"): ("held", "broken"),
    (gateway.SLA_FORECASTS, "outcome"): (MET, MISSED),
    (scheduler.BREAKER, "phase"): tuple(BreakerPhase),
    (scheduler.ADVICE_DROPPED, "kind"): ("timings", "outcome"),
    (predictor.FORECASTS, "source"): tuple(PREDICTORS),
    (predictor.ERROR, "source"): tuple(PREDICTORS),
    # Sizes of the workers of tests/observability/live/load.py.
    (worker.CACHE_CONFIG, "block_size"): ("16",),
    (worker.CACHE_CONFIG, "num_gpu_blocks"): ("24",),
    (gateway.ADAPTERS, "max_lora"): ("2",),
    (gateway.ADAPTERS, "running_lora_adapters"): ("sql", "sql,terse"),
    (gateway.ADAPTERS, "waiting_lora_adapters"): ("", "terse"),
    # Created with the worker's stream (services/worker/unit.py).
    (worker.INVALID_MESSAGES, "method"): ("Attach", "Stream"),
    (worker.INVALID_MESSAGES, "field"): ("message", "request_id"),
    # Read of the engine's adapters (services/worker/serving.py).
    (worker.ADAPTERS, "state"): ("held", "placed", "waiting"),
    (worker.ADAPTER_BYTES, "memory"): ("host", "device"),
    (worker.ADAPTER_REQUESTS, "adapter"): ("sql",),
}


@cache
def values() -> Values:
    """The values of each label of each metric."""
    initial = _initial_values()
    found: dict[tuple[Metric, str], frozenset[str]] = {}
    for metric in (metric for metrics in CATALOGUE.values() for metric in metrics):
        for label in labels_of(metric):
            emitted = initial[metric.family, label] | set(EVENTS.get((metric, label), ()))
            found[metric, label] = frozenset(emitted or DEPLOYMENT[label])
    return found


def _initial_values() -> Mapping[tuple[str, str], set[str]]:
    """The values by family and label that new services expose."""
    registry = CollectorRegistry()
    Metrics(registry, {name: each.named(name) for name, each in SLA_CLASSES.items()})
    SchedulerMetrics(registry).watch(SchedulerState(choose(DEFAULT)))
    PredictorMetrics(registry).set_scores(ScorecardSummary(1, 0.5, 0.5, 0.9, 1.0, 0.1))
    estimator = EstimatorMetrics(registry)
    for name in DEPLOYMENT["worker"]:
        estimator.show(name, CostModel(1.0, 1.0, 1.0, 1.0), (0.1, 0.2))
    BatcherMetrics(registry)
    PickerMetrics(registry, lambda: {}, lambda: 0)
    limits = Limits(4, block_tokens=4, max_batch_tokens=8, report_every_steps=1)
    WorkerMetrics(registry, WorkerState(limits), PhaseClock(), 1)
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for family in registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        for sample in family.samples:
            for label, value in sample.labels.items():
                found[name, label].add(value)
    return found

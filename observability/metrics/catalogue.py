"""CATALOGUE: every metric of foretoken, by the service that exports it.

A name belongs to one service. Where several services measure the same thing, the name includes the
service, so that a scrape of all services counts nothing twice.
"""

from collections.abc import Mapping

from observability.metrics import batcher, estimator, gateway, picker, predictor, scheduler, worker
from observability.metrics.metric import Metric

CATALOGUE: Mapping[str, tuple[Metric, ...]] = {
    "gateway": gateway.ALL,
    "scheduler": scheduler.ALL,
    "predictor": predictor.ALL,
    "estimator": estimator.ALL,
    "batcher": batcher.ALL,
    "worker": worker.ALL,
    "picker": picker.ALL,
}
# Labels of all series of a service, from its process.
PROCESS_LABELS: Mapping[str, tuple[str, ...]] = {
    "gateway": ("model_name",),
    "worker": ("model_name", "worker"),
}

"""CATALOGUE: every metric that foretoken has, by the service that counts it.

One name is one service's: where several count the same thing from where they stand, each says so in
its name, and one scrape of everything adds nothing up twice.
"""

from collections.abc import Mapping

from observability.metrics import batcher, estimator, gateway, predictor, scheduler, worker
from observability.metrics.metric import Metric

CATALOGUE: Mapping[str, tuple[Metric, ...]] = {
    "gateway": gateway.ALL,
    "scheduler": scheduler.ALL,
    "predictor": predictor.ALL,
    "estimator": estimator.ALL,
    "batcher": batcher.ALL,
    "worker": worker.ALL,
}
# Labels that all series of a service have beside their own: of its process, not of what is counted.
PROCESS_LABELS: Mapping[str, tuple[str, ...]] = {
    "gateway": ("model_name",),
    "worker": ("model_name", "worker"),
}

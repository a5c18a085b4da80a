"""What the estimator knows: a cost model a worker, and the timings it was fitted to."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from services.core import CostModel, StepTiming
from services.estimator.coverage import Coverage
from services.estimator.linear import fit


@dataclass
class _Worker:
    coverage: Coverage
    model: CostModel | None = None
    unfitted: int = 0


@dataclass(frozen=True, slots=True)
class Observed:
    """What came of some timings: the worker's present version (0 before the first model)."""

    version: int
    dropped: int
    refitted: bool


class EstimatorState:
    """Cost models by worker; the worker not heard of for longest goes when there are too many.

    The first model is fitted as soon as there are samples enough, each later one after
    `refit_samples` new ones. Versions rise by one a fit.
    """

    def __init__(self, window: int = 2_000, refit_samples: int = 64, workers_max: int = 1_024):
        self._window = window
        self._refit_samples = refit_samples
        self._workers_max = workers_max
        self._workers: OrderedDict[str, _Worker] = OrderedDict()

    def model(self, worker_id: str) -> CostModel | None:
        worker = self._workers.get(worker_id)
        return worker.model if worker else None

    def observe(self, worker_id: str, timings: Sequence[StepTiming]) -> Observed:
        worker = self._worker(worker_id)
        kept = sum(worker.coverage.add(timing) for timing in timings)
        worker.unfitted += kept
        refitted = self._due(worker) and _refit(worker)
        version = worker.model.version if worker.model else 0
        return Observed(version, len(timings) - kept, refitted)

    def _due(self, worker: _Worker) -> bool:
        return worker.unfitted > 0 and (
            worker.model is None or worker.unfitted >= self._refit_samples
        )

    def _worker(self, worker_id: str) -> _Worker:
        if worker_id not in self._workers:
            self._workers[worker_id] = _Worker(Coverage(self._window))
        self._workers.move_to_end(worker_id)
        if len(self._workers) > self._workers_max:
            self._workers.popitem(last=False)
        return self._workers[worker_id]


def _refit(worker: _Worker) -> bool:
    version = worker.model.version + 1 if worker.model else 1
    model = fit(worker.coverage, version)
    if model is None:
        return False
    worker.model, worker.unfitted = model, 0
    return True

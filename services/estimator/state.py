"""What the estimator knows: a cost model a worker, and the timings it was fitted to."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.core import CostModel, Direction, StepTiming, SwapTiming
from services.estimator.coverage import Coverage
from services.estimator.linear import fit
from services.estimator.swaps import SwapRates

NOTICEABLE = 0.1  # relative change of a swap's price that is worth a version of its own


@dataclass
class _Worker:
    coverage: Coverage
    swaps: SwapRates = field(default_factory=SwapRates)
    model: CostModel | None = None
    unfitted: int = 0


@dataclass(frozen=True, slots=True)
class Observed:
    """What came of some timings: the worker's present version (0 before the first model).

    `refitted` to its steps, or `repriced` for its swaps: either way the version is a newer one.
    """

    version: int
    dropped: int
    refitted: bool
    swaps_kept: int = 0
    repriced: bool = False

    @property
    def renewed(self) -> bool:
        return self.refitted or self.repriced


class EstimatorState:
    """Cost models by worker; the worker not heard of for longest goes when there are too many.

    The first model is fitted as soon as the samples determine one, each later one after
    `refit_samples` new ones, or with the same steps when a swap's price has changed noticeably.
    Each has a version one higher; where a fit fails, the last model stays.
    """

    def __init__(self, window: int = 2_000, refit_samples: int = 64, workers_max: int = 1_024):
        self._window = window
        self._refit_samples = refit_samples
        self._workers_max = workers_max
        self._workers: OrderedDict[str, _Worker] = OrderedDict()

    def model(self, worker_id: str) -> CostModel | None:
        worker = self._workers.get(worker_id)
        return worker.model if worker else None

    def observe(
        self, worker_id: str, timings: Sequence[StepTiming], swaps: Sequence[SwapTiming] = ()
    ) -> Observed:
        worker = self._worker(worker_id)
        kept = sum(worker.coverage.add(timing) for timing in timings)
        swaps_kept = sum(worker.swaps.add(swap) for swap in swaps)
        worker.unfitted += kept
        refitted = self._due(worker) and _refit(worker)
        repriced = not refitted and swaps_kept > 0 and _reprice(worker)
        version = worker.model.version if worker.model else 0
        return Observed(version, len(timings) - kept, refitted, swaps_kept, repriced)

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
    worker.unfitted = 0
    if model is not None:
        worker.model = _priced(model, worker.swaps)
    return model is not None


def _reprice(worker: _Worker) -> bool:
    known = worker.model
    if known is None:
        return False
    model = _priced(known, worker.swaps)
    offload = _differs(model.offload_token_s, known.offload_token_s)
    upload = _differs(model.upload_token_s, known.upload_token_s)
    if offload or upload:
        worker.model = replace(model, version=model.version + 1)
    return offload or upload


def _priced(model: CostModel, swaps: SwapRates) -> CostModel:
    return replace(
        model,
        offload_token_s=swaps.token_s(Direction.OFFLOAD),
        upload_token_s=swaps.token_s(Direction.UPLOAD),
    )


def _differs(token_s: float, known_s: float) -> bool:
    return abs(token_s - known_s) > NOTICEABLE * known_s

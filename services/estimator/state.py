"""State of the estimator: cost models by worker and the timings they were fitted to."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.costs import BatchTiming, CostModel, Direction, StepTiming, SwapTiming
from services.estimator.batches import BatchLearning, BatchMemory
from services.estimator.coverage import Coverage
from services.estimator.errors import Errors
from services.estimator.linear import fit
from services.estimator.swaps import SwapRates
from services.runtime.bounded_dict import BoundedDict

MIN_PRICE_CHANGE = 0.1  # relative change of a swap price that makes a new version


@dataclass
class _Worker:
    coverage: Coverage
    batches: BatchMemory
    swaps: SwapRates = field(default_factory=SwapRates)
    errors: Errors = field(default_factory=Errors)
    model: CostModel | None = None
    unfitted: int = 0

    def add_step(self, timing: StepTiming) -> bool:
        """Scores the current model on a step and stores the step; returns False for an unusable
        one."""
        if not self.coverage.add(timing):
            return False
        if self.model:
            expected_s = self.model.step_s(
                timing.prefill_tokens, timing.decode_seqs, timing.context_tokens
            )
            self.errors.add(expected_s, timing.elapsed_s)
        return True

    def serve(self, model: CostModel, version: int) -> None:
        """Publishes the coefficients with the current errors, swap prices and neighbours."""
        measured = self.errors.quantiles()
        median, p90 = measured or (model.error_p50, model.error_p90)
        self.model = replace(
            model,
            version=version,
            error_p50=median,
            error_p90=p90,
            error_steps=len(self.errors) if measured else 0,
            offload_token_s=self.swaps.token_s(Direction.OFFLOAD),
            upload_token_s=self.swaps.token_s(Direction.UPLOAD),
            quantize_token_s=self.swaps.quantize_token_s,
            neighbours=self.batches.neighbours,
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """Result of observing timings: the worker's current version (0 before the first model).

    The version is new when the model was `refitted` to steps, `taught` by inaccurate batch
    estimates, or `repriced` for swaps.
    """

    version: int
    dropped: int
    refitted: bool
    swaps_kept: int = 0
    repriced: bool = False
    batches_kept: int = 0
    taught: bool = False

    @property
    def renewed(self) -> bool:
        return self.refitted or self.repriced or self.taught


class EstimatorState:
    """Cost models by worker; when there are too many, the least recently updated worker is evicted.

    The first model is fitted as soon as the samples determine it, later ones after `refit_samples`
    new samples. Changed swap prices and learned batches also make a new version. When a fit fails,
    the last model stays.
    """

    def __init__(
        self,
        window: int = 2_000,
        refit_samples: int = 64,
        workers_max: int = 1_024,
        learning: BatchLearning | None = None,
    ):
        self._window = window
        self._refit_samples = refit_samples
        self._learning = learning or BatchLearning()
        self._workers = BoundedDict[str, _Worker](workers_max)  # the newest was updated last

    def model(self, worker_id: str) -> CostModel | None:
        worker = self._workers.get(worker_id)
        return worker.model if worker else None

    def batch_error(self, worker_id: str) -> tuple[float, float] | None:
        """Median and 90th percentile of the relative errors of batch estimates, made before
        learning from the batch; None with too few."""
        worker = self._workers.get(worker_id)
        return worker.batches.errors.quantiles() if worker else None

    def observe(
        self,
        worker_id: str,
        timings: Sequence[StepTiming],
        swaps: Sequence[SwapTiming] = (),
        batches: Sequence[BatchTiming] = (),
        now: float = 0.0,
    ) -> Observed:
        """Adds timings and updates the model. `now` only decides when batches are learned from."""
        worker = self._worker(worker_id)
        kept = sum(worker.add_step(timing) for timing in timings)
        swaps_kept = sum(worker.swaps.add(swap) for swap in swaps)
        batches_kept = sum(worker.batches.add(batch, now) for batch in batches)
        worker.unfitted += kept
        known = worker.model
        taught = known is not None and worker.batches.refresh(known, now)
        fitted = self._refit(worker)
        repriced = not fitted and swaps_kept > 0 and _has_new_prices(worker)
        newest = fitted or known
        version = known.version if known else 0
        if newest and (fitted or repriced or taught):
            version += 1
            worker.serve(newest, version)
        return Observed(
            version, len(timings) - kept, fitted is not None, swaps_kept, repriced,
            batches_kept, taught,
        )  # fmt: skip

    def _refit(self, worker: _Worker) -> CostModel | None:
        """Returns a new fit; None when it is not due or not determined."""
        due = self._refit_samples if worker.model else 1
        if worker.unfitted < due:
            return None
        worker.unfitted = 0
        return fit(worker.coverage, version=0)

    def _worker(self, worker_id: str) -> _Worker:
        worker = self._workers.pop(worker_id, None)
        worker = worker or _Worker(Coverage(self._window), BatchMemory(self._learning))
        self._workers[worker_id] = worker
        return worker


def _has_new_prices(worker: _Worker) -> bool:
    known = worker.model
    return known is not None and (
        _changed_noticeably(worker.swaps.token_s(Direction.OFFLOAD), known.offload_token_s)
        or _changed_noticeably(worker.swaps.token_s(Direction.UPLOAD), known.upload_token_s)
    )


def _changed_noticeably(token_s: float, known_s: float) -> bool:
    return abs(token_s - known_s) > MIN_PRICE_CHANGE * known_s

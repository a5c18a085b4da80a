"""What the estimator knows: a cost model a worker, and the timings it was fitted to."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.costs import BatchTiming, CostModel, Direction, StepTiming, SwapTiming
from services.estimator.batches import Batches, Learning
from services.estimator.coverage import Coverage
from services.estimator.errors import Errors
from services.estimator.linear import fit
from services.estimator.swaps import SwapRates

NOTICEABLE = 0.1  # relative change of a swap's price that is worth a version of its own


@dataclass
class _Worker:
    coverage: Coverage
    batches: Batches
    swaps: SwapRates = field(default_factory=SwapRates)
    errors: Errors = field(default_factory=Errors)
    model: CostModel | None = None
    unfitted: int = 0

    def take(self, timing: StepTiming) -> bool:
        """Judge the model served by a step, then keep the step to learn from; False for junk."""
        if not self.coverage.add(timing):
            return False
        if self.model:
            told_s = self.model.step_s(
                timing.prefill_tokens, timing.decode_seqs, timing.context_tokens
            )
            self.errors.add(told_s, timing.elapsed_s)
        return True

    def serve(self, model: CostModel, version: int) -> None:
        """Its coefficients, with all else that is known by now."""
        told = self.errors.quantiles()
        median, p90 = told or (model.error_p50, model.error_p90)
        self.model = replace(
            model,
            version=version,
            error_p50=median,
            error_p90=p90,
            error_steps=len(self.errors) if told else 0,
            offload_token_s=self.swaps.token_s(Direction.OFFLOAD),
            upload_token_s=self.swaps.token_s(Direction.UPLOAD),
            quantize_token_s=self.swaps.quantize_token_s,
            neighbours=self.batches.neighbours,
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """What came of some timings: the worker's present version (0 before the first model).

    `refitted` to its steps, `taught` by batches that were off, or `repriced` for its swaps:
    either way the version is a newer one.
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
    """Cost models by worker; the worker not heard of for longest goes when there are too many.

    The first model is fitted as soon as the samples determine one, each later one after
    `refit_samples` new ones, or with the same steps when a swap's price has changed noticeably or
    batches were learnt from. Each has a version one higher; where a fit fails, the last model
    stays.
    """

    def __init__(
        self,
        window: int = 2_000,
        refit_samples: int = 64,
        workers_max: int = 1_024,
        learning: Learning | None = None,
    ):
        self._window = window
        self._refit_samples = refit_samples
        self._workers_max = workers_max
        self._learning = learning or Learning()
        self._workers: OrderedDict[str, _Worker] = OrderedDict()

    def model(self, worker_id: str) -> CostModel | None:
        worker = self._workers.get(worker_id)
        return worker.model if worker else None

    def batch_error(self, worker_id: str) -> tuple[float, float] | None:
        """Median and 90th percentile, relative, of its batches told by their neighbours before
        they were learnt from; None while too few were."""
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
        """`now` says when batches are due to be learnt from, and nothing else."""
        worker = self._worker(worker_id)
        kept = sum(worker.take(timing) for timing in timings)
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
        """None while there is none to be had, or no need of one."""
        due = self._refit_samples if worker.model else 1
        if worker.unfitted < due:
            return None
        worker.unfitted = 0
        return fit(worker.coverage, version=0)

    def _worker(self, worker_id: str) -> _Worker:
        if worker_id not in self._workers:
            self._workers[worker_id] = _Worker(Coverage(self._window), Batches(self._learning))
        self._workers.move_to_end(worker_id)
        if len(self._workers) > self._workers_max:
            self._workers.popitem(last=False)
        return self._workers[worker_id]


def _has_new_prices(worker: _Worker) -> bool:
    known = worker.model
    return known is not None and (
        _differs(worker.swaps.token_s(Direction.OFFLOAD), known.offload_token_s)
        or _differs(worker.swaps.token_s(Direction.UPLOAD), known.upload_token_s)
    )


def _differs(token_s: float, known_s: float) -> bool:
    return abs(token_s - known_s) > NOTICEABLE * known_s

"""State of the estimator: cost models by worker and the timings they were fitted to."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.costs import BatchTiming, CostModel, Direction, StepTiming, SwapTiming
from services.estimator.batches import BatchLearning, BatchMemory
from services.estimator.linear import fit
from services.estimator.windows import ErrorWindow, StepWindow, SwapRates
from services.runtime.bounded_dict import BoundedDict

MIN_PRICE_CHANGE = 0.1  # relative change of a swap price that makes a new version


@dataclass
class _Worker:
    steps: StepWindow
    batches: BatchMemory
    swaps: SwapRates = field(default_factory=SwapRates)
    errors: ErrorWindow = field(default_factory=ErrorWindow)
    model: CostModel | None = None
    unfitted: int = 0  # steps since the last fit
    fit_due_s: float = 0.0  # not before

    def add_step(self, step: StepTiming) -> bool:
        """Scores the current model on a step and stores the step; returns False for an unusable
        one."""
        if not self.steps.add(step):
            return False
        if self.model:
            expected_s = self.model.step_s(
                step.prefill_tokens, step.decode_seqs, step.context_tokens
            )
            self.errors.add(expected_s, step.elapsed_s)
        return True

    def refit(self, refit_samples: int, interval_s: float, now: float) -> CostModel | None:
        """Returns a new fit; None when it is not due or not determined."""
        if self.unfitted < (refit_samples if self.model else 1):
            return None
        if self.model and now < self.fit_due_s:
            return None
        self.unfitted = 0
        self.fit_due_s = now + interval_s
        return fit(self.steps)

    def has_new_prices(self) -> bool:
        if self.model is None:
            return False
        offload_s, upload_s = self.model.offload_token_s, self.model.upload_token_s
        return any(
            abs(self.swaps.token_s(direction) - known_s) > MIN_PRICE_CHANGE * known_s
            for direction, known_s in ((Direction.OFFLOAD, offload_s), (Direction.UPLOAD, upload_s))
        )

    def publish(self, model: CostModel, version: int) -> None:
        """Makes the coefficients current, with the current errors, swap prices and neighbours."""
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

    The version is new when the model was `refitted` to steps, `learned` from inaccurate batch
    estimates, or was `repriced` for swaps.
    """

    version: int
    dropped: int
    refitted: bool
    swaps_kept: int
    repriced: bool
    batches_kept: int
    learned: bool

    @property
    def changed(self) -> bool:
        return self.refitted or self.repriced or self.learned


class EstimatorState:
    """Cost models by worker; when there are too many, the least recently updated worker is evicted.

    The first model is fitted as soon as the samples determine it, later ones after `refit_samples`
    new samples and `refit_interval_s`. Changed swap prices and learned batches also make a new
    version. When a fit fails, the last model stays.
    """

    def __init__(
        self,
        window: int = 2_000,
        refit_samples: int = 64,
        workers_max: int = 1_024,
        learning: BatchLearning | None = None,
        refit_interval_s: float = 0.0,
    ):
        self._window = window
        self._refit_samples, self._refit_interval_s = refit_samples, refit_interval_s
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
        """Adds timings and updates the model. `now` only decides when models are fitted again and
        batches are learned from."""
        worker = self._workers.pop(worker_id, None)
        worker = worker or _Worker(StepWindow(self._window), BatchMemory(self._learning))
        self._workers[worker_id] = worker
        kept = sum(worker.add_step(timing) for timing in timings)
        swaps_kept = sum(worker.swaps.add(swap) for swap in swaps)
        batches_kept = sum(worker.batches.add(batch, now) for batch in batches)
        worker.unfitted += kept
        known = worker.model
        learned = known is not None and worker.batches.refresh(known, now)
        fitted = worker.refit(self._refit_samples, self._refit_interval_s, now)
        repriced = not fitted and swaps_kept > 0 and worker.has_new_prices()
        newest = fitted or known
        version = known.version if known else 0
        if newest and (fitted or repriced or learned):
            version += 1
            worker.publish(newest, version)
        dropped = len(timings) - kept
        refitted = fitted is not None
        return Observed(version, dropped, refitted, swaps_kept, repriced, batches_kept, learned)

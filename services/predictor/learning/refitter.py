"""Refits the models periodically and adopts the results."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from services.predictor.blend.content import Refit, Refitted
from services.predictor.learning.refit_process import FitFailed
from services.predictor.learning.schedule import RefitSchedule
from services.predictor.serving.executor import CpuBudgetedExecutor

log = logging.getLogger(__name__)


class Refittable(Protocol):
    """The methods of ContentPredictor that fitting needs."""

    pending: int

    def refit(self, seed: int = 0) -> Refit | None: ...

    def adopt(self, refitted: Refitted) -> None: ...


class Refitter:
    """Checks every `interval_s` whether a fit is due, runs it, and adopts its result.

    All changes to the predictor happen on the executor. A failed fit is retried at the next check;
    the current models continue to serve. `on_end` is called with "adopted" or "failed" and the
    duration.
    """

    def __init__(
        self,
        predictor: Refittable,
        schedule: RefitSchedule,
        run: Callable[[Refit], Awaitable[Refitted]],
        on_end: Callable[[str, float], None],
        executor: CpuBudgetedExecutor,
    ):
        self.version = 0  # number of adopted fits
        self.adopted_at_s = 0.0  # by time.monotonic()
        self._predictor = predictor
        self._schedule = schedule
        self._run = run
        self._on_end = on_end
        self._executor = executor
        self._last_examples = 0  # of the last adopted fit
        self._last_failed = False
        self._has_fitted = False

    async def run(self, examples: Callable[[], int]) -> None:
        """Runs until cancelled. `examples` returns the size of the training set."""
        while True:
            if examples() >= self._schedule.examples_min and self._is_due():
                await self._refit()
            await asyncio.sleep(self._schedule.check_interval_s(self._has_fitted))

    def _is_due(self) -> bool:
        due = self._schedule.is_due(self._predictor.pending, self._last_examples)
        return self._last_failed or due

    async def _refit(self) -> None:
        refit = await self._executor.run(partial(self._predictor.refit, self._schedule.seed))
        if refit is None:
            return
        self._has_fitted = True
        began_s = time.monotonic()
        try:
            refitted = await self._run(refit)
        except FitFailed as failure:
            self._last_failed = True
            self._on_end("failed", time.monotonic() - began_s)
            log.warning(
                "the predictor's models could not be refitted (%s); retrying in %g s",
                failure,
                self._schedule.interval_s,
            )
        else:
            await self._adopt(refitted)
            self._on_end("adopted", time.monotonic() - began_s)

    async def _adopt(self, refitted: Refitted) -> None:
        await self._executor.run(partial(self._predictor.adopt, refitted))
        self._last_failed = False
        self._last_examples = refitted.examples
        self.version += 1
        self.adopted_at_s = time.monotonic()
        log.info(
            "adopted the predictor's models, version %d, fitted to %d outcomes",
            self.version,
            refitted.examples,
        )

"""When models are fitted anew, and by what the new ones take over."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from services.predictor.blend.content import Refit, Refitted
from services.predictor.learning.refit_process import FitFailed
from services.predictor.serving.executor import Desk

log = logging.getLogger(__name__)

FIRST_LOOK_S = 5.0  # while nothing was fitted yet, whoever waits for the first model waits less


class Refittable(Protocol):
    """Of `ContentPredictor`, what fitting needs."""

    @property
    def pending(self) -> int: ...

    def refit(self, seed: int = 0) -> Refit | None: ...

    def adopt(self, refitted: Refitted) -> None: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How often, and on how much; the reasons stand in config.py."""

    interval_s: float
    examples_min: int
    new_min: int
    new_share: float
    seed: int


class Refitter:
    """Looks every `interval_s` whether a fit is due, runs it apart, and adopts its result.

    The predictor is asked and told at the desk, where all that changes it happens. A fit that
    fails is tried again at the next look; what serves meanwhile is what served before.
    `ended` is told "adopted" or "failed", and the seconds it took.
    """

    def __init__(
        self,
        predictor: Refittable,
        pace: Pace,
        run: Callable[[Refit], Awaitable[Refitted]],
        ended: Callable[[str, float], None],
        desk: Desk,
    ):
        self.version = 0  # results adopted
        self.adopted_at_s = 0.0  # by time.monotonic()
        self._predictor = predictor
        self._pace = pace
        self._run = run
        self._ended = ended
        self._desk = desk
        self._fitted_on = 0
        self._owed = False  # the last fit failed
        self._tried = False

    async def run(self, examples: Callable[[], int]) -> None:
        """Until cancelled. `examples` counts what there is to fit on."""
        while True:
            if examples() >= self._pace.examples_min and self._is_due():
                await self._refit()
            await asyncio.sleep(self._pause_s())

    def _is_due(self) -> bool:
        enough = max(self._pace.new_min, self._pace.new_share * self._fitted_on)
        return self._owed or self._predictor.pending >= enough

    def _pause_s(self) -> float:
        most = self._pace.interval_s
        return most if self._tried else min(most, FIRST_LOOK_S)

    async def _refit(self) -> None:
        refit = await self._desk.run(partial(self._predictor.refit, self._pace.seed))
        if refit is None:
            return
        self._tried = True
        began_s = time.monotonic()
        try:
            refitted = await self._run(refit)
        except FitFailed as failure:
            self._owed = True
            self._ended("failed", time.monotonic() - began_s)
            log.warning(
                "the predictor's models could not be fitted anew (%s): tried again in %g s",
                failure,
                self._pace.interval_s,
            )
        else:
            await self._adopt(refitted)
            self._ended("adopted", time.monotonic() - began_s)

    async def _adopt(self, refitted: Refitted) -> None:
        await self._desk.run(partial(self._predictor.adopt, refitted))
        self._owed = False
        self._fitted_on = refitted.examples
        self.version += 1
        self.adopted_at_s = time.monotonic()
        log.info(
            "the predictor's models, version %d, are fitted to %d outcomes",
            self.version,
            refitted.examples,
        )

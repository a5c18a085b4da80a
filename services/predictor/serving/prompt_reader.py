"""Prompts → features and forecasts, in the background."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from services.forecast import Forecast
from services.predictor.encoder.extract import Extracts
from services.predictor.encoder.packing import pack
from services.predictor.interface import Features, Prompt, Query
from services.predictor.serving.executor import Desk
from services.predictor.serving.forecaster import Asked, Reading

log = logging.getLogger(__name__)

BATCH = 8  # prompts; the encoder gains little beyond a few, and newer ones may come meanwhile


class Queue(Protocol):
    """Of a cascade, what reading needs."""

    def take(self, most: int) -> list[Asked]: ...

    def read(self, batch: Sequence[Asked], readings: Sequence[Reading]) -> None: ...


class Eyes:
    """Reads a batch, in the thread of the desk. Nothing that fails keeps another from being read.

    foretell: the model's forecasts of queries with features.
    """

    def __init__(
        self, extractor: Extracts, foretell: Callable[[Sequence[Query]], list[Forecast | None]]
    ):
        self._extractor = extractor
        self._foretell = foretell
        self._failures_said: set[str] = set()

    def read(self, batch: Sequence[Asked]) -> list[Reading]:
        """One each, in order."""
        found = self._extract([asked.query.prompt or NO_PROMPT for asked in batch])
        readings = [each if isinstance(each, Reading) else self._packed(each) for each in found]
        return self._foretold(batch, readings)

    def _extract(self, prompts: Sequence[Prompt]) -> list[Features | Reading]:
        try:
            return [*self._extractor.extract(prompts)]
        except Exception as error:
            if len(prompts) == 1:
                return [self._missed("failed", error)]
            return [self._extract([prompt])[0] for prompt in prompts]

    def _packed(self, features: Features) -> Reading:
        try:
            return Reading(features, pack(features))
        except ValueError as error:
            return self._missed("broken", error)

    def _foretold(self, batch: Sequence[Asked], readings: Sequence[Reading]) -> list[Reading]:
        """Those that ended are read to be learnt from: nobody asks any more."""
        rows = [i for i, r in enumerate(readings) if r.features and not batch[i].late]
        queries = [replace(batch[i].query, features=readings[i].features) for i in rows]
        said = list(readings)
        try:
            forecasts = self._foretell(queries) if queries else []
        except Exception as error:
            missed = self._missed("model", error).missed
            for i in rows:
                said[i] = Reading(said[i].features, said[i].packed, missed=missed)
        else:
            for i, forecast in zip(rows, forecasts, strict=True):
                said[i] = Reading(said[i].features, said[i].packed, forecast)
        return said

    def _missed(self, reason: str, error: Exception) -> Reading:
        if reason not in self._failures_said:
            self._failures_said.add(reason)
            log.warning(
                "a prompt could not be read (%s: %s): it is forecast by history; this is said once",
                reason,
                error,
                exc_info=error,
            )
        return Reading(missed=reason)


NO_PROMPT = Prompt("", "", 0)


class Reader:
    """Takes turns at the desk for as long as anything is unread; `wake` when something is."""

    def __init__(self, eyes: Eyes, queue: Queue, desk: Desk):
        self._eyes, self._queue, self._desk = eyes, queue, desk
        self._unread = asyncio.Event()

    def wake(self) -> None:
        self._unread.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._unread.wait()
            async with self._desk.turn() as do:
                if batch := self._queue.take(BATCH):
                    self._queue.read(batch, await do(partial(self._eyes.read, batch)))
                else:
                    self._unread.clear()

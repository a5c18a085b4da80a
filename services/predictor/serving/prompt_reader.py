"""Reads prompts in the background: features and forecasts."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from services.forecast import Forecast
from services.predictor.encoder.extract import FeatureExtractor
from services.predictor.encoder.packing import pack
from services.predictor.interface import Features, Prompt, Query
from services.predictor.serving.executor import CpuBudgetedExecutor
from services.predictor.serving.forecaster import ForecastQuery, PromptReading, TwoStageForecaster

log = logging.getLogger(__name__)

BATCH = 8  # prompts; larger batches gain little and delay newer prompts


class PromptBatchReader:
    """Reads a batch of prompts in the executor's thread. A failing prompt does not affect the
    others.

    forecast: the model's forecasts of queries with features.
    """

    def __init__(
        self,
        extractor: FeatureExtractor,
        forecast: Callable[[Sequence[Query]], list[Forecast | None]],
    ):
        self._extractor = extractor
        self._forecast = forecast
        self._failures_logged: set[str] = set()

    def read(self, batch: Sequence[ForecastQuery]) -> list[PromptReading]:
        """Returns one reading per query, in order."""
        extracted = self._extract([request.query.prompt or NO_PROMPT for request in batch])
        readings = [
            each if isinstance(each, PromptReading) else self._pack(each) for each in extracted
        ]
        return self._with_forecasts(batch, readings)

    def _extract(self, prompts: Sequence[Prompt]) -> list[Features | PromptReading]:
        try:
            return [*self._extractor.extract(prompts)]
        except Exception as error:
            if len(prompts) == 1:
                return [self._failed_reading("failed", error)]
            return [self._extract([prompt])[0] for prompt in prompts]

    def _pack(self, features: Features) -> PromptReading:
        try:
            return PromptReading(features, pack(features))
        except ValueError as error:
            return self._failed_reading("broken", error)

    def _with_forecasts(
        self, batch: Sequence[ForecastQuery], readings: Sequence[PromptReading]
    ) -> list[PromptReading]:
        """Adds forecasts, except for ended requests, which are only learned from."""
        rows = [i for i, r in enumerate(readings) if r.features and not batch[i].ended_request]
        queries = [replace(batch[i].query, features=readings[i].features) for i in rows]
        results = list(readings)
        try:
            forecasts = self._forecast(queries) if queries else []
        except Exception as error:
            failed_step = self._failed_reading("model", error).failed_step
            for i in rows:
                results[i] = replace(results[i], failed_step=failed_step)
        else:
            for i, forecast in zip(rows, forecasts, strict=True):
                results[i] = replace(results[i], by_model=forecast)
        return results

    def _failed_reading(self, step: str, error: Exception) -> PromptReading:
        if step not in self._failures_logged:
            self._failures_logged.add(step)
            log.warning(
                "a prompt could not be read (%s: %s); history is used (logged once per reason)",
                step,
                error,
                exc_info=error,
            )
        return PromptReading(failed_step=step)


NO_PROMPT = Prompt("", "", 0)


class PromptReadingLoop:
    """Reads batches on the executor while the queue is not empty; `wake` restarts it."""

    def __init__(
        self,
        batch_reader: PromptBatchReader,
        queue: TwoStageForecaster,
        executor: CpuBudgetedExecutor,
    ):
        self._batch_reader, self._queue, self._executor = batch_reader, queue, executor
        self._unread = asyncio.Event()

    def wake(self) -> None:
        self._unread.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._unread.wait()
            async with self._executor.turn() as run:
                if batch := self._queue.next_batch(BATCH):
                    self._queue.read(batch, await run(partial(self._batch_reader.read, batch)))
                else:
                    self._unread.clear()

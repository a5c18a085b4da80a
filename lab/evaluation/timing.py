"""Measures milliseconds per forecast, including reading the prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Protocol, runtime_checkable

from lab.data.examples import BATCH, prompt_of, query_of
from lab.data.rows import Row
from services.predictor.encoder.extract import FeatureExtractor
from services.predictor.interface import Features, Predictor

SINGLES = 200
MAX_ROWS = 512


@runtime_checkable
class HasCache(Protocol):
    """A predictor that caches forecasts of prompts."""

    def forget(self) -> None: ...


MakeExtractor = Callable[[], FeatureExtractor]  # makes an extractor with an empty cache


@dataclass(frozen=True, slots=True)
class Timing:
    """Median milliseconds per forecast.

    ms_batch1: single new prompts. ms_cached: the same prompts again. ms_batch64: new prompts in
      batches of 64.
    """

    ms_batch1: float
    ms_cached: float
    ms_batch64: float


def time_forecasts(
    predictor: Predictor, rows: Sequence[Row], max_tokens: int, make_extractor: MakeExtractor | None
) -> Timing:
    """Times forecasts of at most MAX_ROWS rows with different prompts. Without `make_extractor` no
    prompt is read.

    At least SINGLES single forecasts are timed: with fewer prompts, passes with a new extractor are
    added.
    """
    rows = list({row.prompt: row for row in rows}.values())[:MAX_ROWS]
    singles = [[row] for row in rows[:SINGLES]]
    full = max(len(rows) // BATCH, 1)  # a smaller batch at the end would cost more per row
    batches = [rows[i * BATCH : (i + 1) * BATCH] for i in range(full)]
    clock = _Clock(predictor, max_tokens)
    new: list[float] = []
    cached: list[float] = []
    while len(new) < SINGLES:
        extractor = _warm_up(clock, rows[-1:], make_extractor)
        new += [clock.time(single, extractor) for single in singles]
        cached += [clock.time(single, extractor) for single in singles]
    extractor = _warm_up(clock, rows[-1:], make_extractor)
    batched = [clock.time(batch, extractor) / len(batch) for batch in batches]
    return Timing(median(new), median(cached), median(batched))


def _warm_up(
    clock: "_Clock", rows: Sequence[Row], make_extractor: MakeExtractor | None
) -> FeatureExtractor | None:
    """Runs the work of a first forecast, clears the predictor's cache and returns a new
    extractor."""
    clock.time(rows, make_extractor() if make_extractor else None)
    clock.forget()
    return make_extractor() if make_extractor else None


class _Clock:
    def __init__(self, predictor: Predictor, max_tokens: int):
        self._predictor = predictor
        self._max_tokens = max_tokens

    def forget(self) -> None:
        if isinstance(self._predictor, HasCache):
            self._predictor.forget()

    def time(self, rows: Sequence[Row], extractor: FeatureExtractor | None) -> float:
        """Returns the milliseconds from the rows' text to their forecasts."""
        prompts = [prompt_of(row) for row in rows]
        began_s = perf_counter()
        read: Sequence[Features | None] = [None] * len(rows)
        if extractor:
            read = extractor.extract(prompts)
        queries = [query_of(r, f, self._max_tokens) for r, f in zip(rows, read, strict=True)]
        self._predictor.forecast(queries)
        return (perf_counter() - began_s) * 1e3

"""Two-stage forecasts: an immediate one without reading the prompt, an improved one after reading
it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.core import Outcome
from services.forecast import Forecast
from services.lengths import LEARNABLE_REASONS
from services.predictor.blend.guard import Forecaster, ForecastPair
from services.predictor.encoder.extract import FeatureExtractor
from services.predictor.encoder.packing import pack
from services.predictor.interface import Features, Prompt, Query
from services.predictor.serving.forecast_cache import CachedForecast, ForecastCache
from services.predictor.serving.newest_first_queue import NewestFirstQueue
from services.predictor.serving.pending import PendingForecast, PendingForecasts

REMEMBERED, WORDS, PLAIN = "remembered", "words", "plain"  # stages of an immediate forecast


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that finished before its prompt was read; kept to learn from."""

    outcome: Outcome
    waiting: PendingForecast
    finished_at_s: float


@dataclass(frozen=True, slots=True)
class ForecastQuery:
    """A request to forecast; with `ended_request`, an ended request that is only learned from."""

    request_id: str
    query: Query
    at_s: float
    ended_request: EndedRequest | None = None


@dataclass(frozen=True, slots=True)
class PromptReading:
    """Result of reading one prompt: features, the same packed for the log, and the model's
    forecast.

    `missed` names the step that failed, empty for none. Without a forecast and without a failure,
    no model is ready yet.
    """

    features: Features | None = None
    packed: bytes = b""
    by_model: Forecast | None = None
    missed: str = ""


@dataclass(frozen=True, slots=True)
class ReadingResult:
    """Result of reading a batch.

    waiting, ended: prompts read of requests that were waiting at the start, and of ended ones.
    better: improved forecasts of waiting requests; since_s: when each was requested.
    ended_features: ended requests with their packed features.
    missed: names of the steps that failed.
    """

    waiting: int
    ended: int
    better: tuple[tuple[str, Forecast], ...]
    since_s: tuple[float, ...]
    ended_features: tuple[tuple[EndedRequest, bytes], ...]
    missed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImmediateForecast:
    """The forecast answered at once and the stage that produced it."""

    pair: ForecastPair
    stage: str


class TwoStageForecaster:
    """Answers forecasts and keeps the queues of prompts to be read.

    reads: prompts are read at all.
    keeps_text: prompts are written to the outcome log.
    at_once: reads prompts before answering, for models without an encoder; nothing is queued then.
    """

    def __init__(
        self,
        forecaster: Forecaster,
        pending: PendingForecasts,
        remembered: ForecastCache,
        unread_max: int,
        reads: bool,
        keeps_text: bool,
        changed: Callable[[ReadingResult], None],
        at_once: FeatureExtractor | None = None,
    ):
        self.unread: NewestFirstQueue[ForecastQuery] = NewestFirstQueue(unread_max)
        self.ended: NewestFirstQueue[ForecastQuery] = NewestFirstQueue(unread_max)
        self._forecaster = forecaster
        self._pending = pending
        self._remembered = remembered
        self._reads, self._keeps_text = reads, keeps_text
        self._changed = changed
        self._at_once = at_once
        self._in_progress: dict[str, EndedRequest | None] = {}

    def answer(self, batch: Sequence[ForecastQuery]) -> list[ImmediateForecast]:
        """Returns one forecast per query, in order, and queues the prompts whose forecasts can
        improve."""
        if self._at_once:
            return self._read_and_answer(batch, self._at_once)
        seen = [self._seen(request.query) for request in batch]
        others = iter(
            self._forecaster.forecast(
                [request.query for request, s in zip(batch, seen, strict=True) if not s]
            )
        )
        return [
            self._answer_from_cache(request, s) if s else self._answer_unread(request, next(others))
            for request, s in zip(batch, seen, strict=True)
        ]

    def end(self, outcome: Outcome, waiting: PendingForecast | None, finished_at_s: float) -> None:
        """Records that a request ended. If its outcome is usable, its prompt is read after all
        prompts of running requests."""
        name = outcome.request_id
        fit = outcome.reason in LEARNABLE_REASONS and outcome.output_tokens > 0
        ended_request = EndedRequest(outcome, waiting, finished_at_s) if waiting and fit else None
        if name in self._in_progress:
            self._in_progress[name] = ended_request
        elif (request := self.unread.pop(name)) and ended_request:
            self.ended.put(name, replace(request, ended_request=ended_request))

    def next_batch(self, limit: int) -> list[ForecastQuery]:
        """Returns the newest waiting prompts, else the newest of ended requests."""
        batch = self.unread.pop_newest(limit) or self.ended.pop_newest(limit)
        self._in_progress = {request.request_id: request.ended_request for request in batch}
        return batch

    def read(self, batch: Sequence[ForecastQuery], readings: Sequence[PromptReading]) -> None:
        """Applies the readings of the batch from `next_batch`."""
        better: list[tuple[str, Forecast]] = []
        since_s: list[float] = []
        ended_features: list[tuple[EndedRequest, bytes]] = []
        for request, reading in zip(batch, readings, strict=True):
            ended = self._in_progress.pop(request.request_id)
            if reading.by_model:
                seen = CachedForecast(reading.by_model, reading.packed, self._forecaster.edition)
                self._remembered.put(request.query, seen)
            if ended and reading.packed:
                ended_features.append((ended, reading.packed))
            elif (pair := self._improved(request, reading)) and pair.given is pair.by_model:
                better.append((request.request_id, pair.given))
                since_s.append(request.at_s)
        missed = tuple(reading.missed for reading in readings if reading.missed)
        ended_before = sum(request.ended_request is not None for request in batch)
        self._changed(
            ReadingResult(
                len(batch) - ended_before,
                ended_before,
                tuple(better),
                tuple(since_s),
                tuple(ended_features),
                missed,
            )
        )

    def _read_and_answer(
        self, batch: Sequence[ForecastQuery], reader: FeatureExtractor
    ) -> list[ImmediateForecast]:
        rows = [i for i, request in enumerate(batch) if request.query.prompt]
        features = reader.extract([p for request in batch if (p := request.query.prompt)])
        queries = [request.query for request in batch]
        packed = [b""] * len(batch)
        for i, read in zip(rows, features, strict=True):
            queries[i], packed[i] = replace(queries[i], features=read), pack(read)
        pair = self._forecaster.forecast(queries)
        for request, each, bytes_ in zip(batch, pair, packed, strict=True):
            self._add_pending(request, PendingForecast(each, bytes_, self._kept(request)))
        return [ImmediateForecast(each, WORDS if each.by_model else PLAIN) for each in pair]

    def _seen(self, query: Query) -> CachedForecast | None:
        return self._remembered.get(query) if self._reads else None

    def _answer_from_cache(self, request: ForecastQuery, seen: CachedForecast) -> ImmediateForecast:
        """Answers from the cache; queues the prompt again if the models have changed since."""
        [by_history] = self._forecaster.by_history([request.query])
        pair = self._forecaster.choose(seen.by_model, by_history)
        if seen.edition == self._forecaster.edition:
            self._add_pending(request, PendingForecast(pair, seen.packed, self._kept(request)))
        else:
            self._add_pending(request, PendingForecast(pair, b"", self._kept(request)))
            self._queue_unread(request)
        return ImmediateForecast(pair, REMEMBERED)

    def _answer_unread(self, request: ForecastQuery, pair: ForecastPair) -> ImmediateForecast:
        self._add_pending(request, PendingForecast(pair, b"", self._kept(request)))
        self._queue_unread(request)
        return ImmediateForecast(pair, WORDS if pair.by_model else PLAIN)

    def _add_pending(self, request: ForecastQuery, waiting: PendingForecast) -> None:
        self._pending.put(request.request_id, waiting)

    def _queue_unread(self, request: ForecastQuery) -> None:
        """Queues the prompt if there is text that was not read for this request yet."""
        name = request.request_id
        waiting = self._pending.get(name)
        if (
            self._reads
            and request.query.prompt
            and waiting
            and not waiting.packed
            and name not in self._in_progress
        ):
            self.unread.put(name, request)

    def _improved(self, request: ForecastQuery, reading: PromptReading) -> ForecastPair | None:
        waiting = self._pending.get(request.request_id)
        if waiting is None or not reading.packed:
            return None
        pair = waiting.pair
        if reading.by_model:
            pair = self._forecaster.choose(reading.by_model, pair.by_history)
        self._pending.amend(request.request_id, replace(waiting, pair=pair, packed=reading.packed))
        return pair if reading.by_model else None

    def _kept(self, request: ForecastQuery) -> Prompt | None:
        return request.query.prompt if self._keeps_text else None

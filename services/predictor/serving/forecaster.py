"""Two-stage forecasts: an immediate one, and an improved one after the prompt was read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.core import Outcome
from services.forecast import Forecast
from services.lengths import is_learnable
from services.predictor.blend.guarded_forecaster import ForecastPair, GuardedForecaster
from services.predictor.encoder.extract import FeatureExtractor
from services.predictor.encoder.packing import pack
from services.predictor.interface import Features, Query
from services.predictor.serving.forecast_cache import CachedForecast, ForecastCache
from services.predictor.serving.newest_first_queue import NewestFirstQueue
from services.predictor.serving.pending import PendingForecast, PendingForecasts

# Stages of an immediate forecast
REMEMBERED, WORDS, PLAIN, READ = "remembered", "words", "plain", "read"


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that finished before its prompt was read; kept to learn from."""

    outcome: Outcome
    pending: PendingForecast
    finished_at_s: float


@dataclass(frozen=True, slots=True)
class ForecastQuery:
    """A request to forecast; with `ended_request`, an ended request that is only learned from."""

    request_id: str
    query: Query
    requested_at_s: float
    ended_request: EndedRequest | None = None


@dataclass(frozen=True, slots=True)
class PromptReading:
    """Result of reading one prompt: features, the same packed for the log, and the model's
    forecast.

    `failed_step` is empty without a failure. Without a forecast and a failure, no model is ready
    yet.
    """

    features: Features | None = None
    packed: bytes = b""
    by_model: Forecast | None = None
    failed_step: str = ""


@dataclass(frozen=True, slots=True)
class ReadingResult:
    """Result of reading a batch.

    waiting, ended: number of prompts of requests that were running at the start, or had ended.
    improved: request ids with improved forecasts; requested_at_s: when each was requested.
    ended_features: ended requests with their packed features.
    """

    waiting: int
    ended: int
    improved: tuple[tuple[str, Forecast], ...]
    requested_at_s: tuple[float, ...]
    ended_features: tuple[tuple[EndedRequest, bytes], ...]
    failed_steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImmediateForecast:
    """The forecast answered at once and the stage that produced it."""

    pair: ForecastPair
    stage: str


class TwoStageForecaster:
    """Answers forecasts and keeps the queues of prompts to be read.

    reads: the predictor reads prompts.
    keeps_text: prompts are written to the outcome log.
    on_read: called with the result of each batch of prompts.
    at_once: reads prompts before answering, for models without an encoder; nothing is queued then.
    """

    def __init__(
        self,
        forecaster: GuardedForecaster,
        pending: PendingForecasts,
        cache: ForecastCache,
        unread_max: int,
        reads: bool,
        keeps_text: bool,
        on_read: Callable[[ReadingResult], None],
        at_once: FeatureExtractor | None = None,
    ):
        self.unread: NewestFirstQueue[ForecastQuery] = NewestFirstQueue(unread_max)
        self.ended: NewestFirstQueue[ForecastQuery] = NewestFirstQueue(unread_max)
        self._forecaster = forecaster
        self._pending = pending
        self._cache = cache
        self._reads, self._keeps_text = reads, keeps_text
        self._on_read = on_read
        self._at_once = at_once
        self._in_progress: dict[str, EndedRequest | None] = {}

    def answer(self, batch: Sequence[ForecastQuery]) -> list[ImmediateForecast]:
        """Returns one forecast per query, in order, and queues the prompts with
        forecasts that can improve."""
        if self._at_once:
            return self._read_and_answer(batch, self._at_once)
        cached = [self._cache.get(r.query) if self._reads else None for r in batch]
        unread = [r.query for r, hit in zip(batch, cached, strict=True) if not hit]
        pairs = iter(self._forecaster.forecast(unread))
        return [
            self._answer_from_cache(r, hit) if hit else self._answer_unread(r, next(pairs))
            for r, hit in zip(batch, cached, strict=True)
        ]

    def answer_read(
        self, batch: Sequence[ForecastQuery], readings: Sequence[PromptReading]
    ) -> list[ImmediateForecast]:
        """Returns one forecast per query, with prompts that are read already; nothing is
        queued."""
        pairs = self._forecaster.forecast([request.query for request in batch])
        answers = []
        for request, reading, pair in zip(batch, readings, pairs, strict=True):
            stage = PLAIN
            if reading.by_model:
                stage = READ
                pair = self._forecaster.choose(request.query, reading.by_model, pair.by_history)
            self._add_pending(request, pair, reading.packed)
            answers.append(ImmediateForecast(pair, stage))
        return answers

    def end(self, outcome: Outcome, pending: PendingForecast | None, finished_at_s: float) -> None:
        """Records that a request ended. If its outcome is usable, its prompt is read after all
        prompts of running requests."""
        name = outcome.request_id
        ended_request = None
        if pending and is_learnable(outcome):
            ended_request = EndedRequest(outcome, pending, finished_at_s)
        if name in self._in_progress:
            self._in_progress[name] = ended_request
        elif (request := self.unread.pop(name)) and ended_request:
            self.ended.put(name, replace(request, ended_request=ended_request))

    def drop(self, request_id: str) -> None:
        """Forgets a request that ended without an outcome. A prompt that is being read is not
        learned from."""
        self._pending.pop(request_id)
        self.unread.pop(request_id)

    def next_batch(self, limit: int) -> list[ForecastQuery]:
        """Returns the newest waiting prompts, else the newest of ended requests."""
        batch = self.unread.pop_newest(limit) or self.ended.pop_newest(limit)
        self._in_progress = {request.request_id: request.ended_request for request in batch}
        return batch

    def read(self, batch: Sequence[ForecastQuery], readings: Sequence[PromptReading]) -> None:
        """Applies the readings of the batch from `next_batch`."""
        improved: list[tuple[str, Forecast]] = []
        requested_at_s: list[float] = []
        ended_features: list[tuple[EndedRequest, bytes]] = []
        for request, reading in zip(batch, readings, strict=True):
            ended = self._in_progress.pop(request.request_id)
            if reading.by_model:
                edition = self._forecaster.edition
                result = CachedForecast(reading.by_model, reading.packed, edition)
                self._cache.put(request.query, result)
            if ended and reading.packed:
                ended_features.append((ended, reading.packed))
            elif (pair := self._improve(request, reading)) and pair.given is pair.by_model:
                improved.append((request.request_id, pair.given))
                requested_at_s.append(request.requested_at_s)
        ended_before = sum(request.ended_request is not None for request in batch)
        self._on_read(
            ReadingResult(
                len(batch) - ended_before,
                ended_before,
                tuple(improved),
                tuple(requested_at_s),
                tuple(ended_features),
                tuple(reading.failed_step for reading in readings if reading.failed_step),
            )
        )

    def _read_and_answer(
        self, batch: Sequence[ForecastQuery], reader: FeatureExtractor
    ) -> list[ImmediateForecast]:
        rows = [i for i, request in enumerate(batch) if request.query.prompt]
        features = reader.extract([p for request in batch if (p := request.query.prompt)])
        queries = [request.query for request in batch]
        packed = [b""] * len(batch)
        for i, extracted in zip(rows, features, strict=True):
            queries[i], packed[i] = replace(queries[i], features=extracted), pack(extracted)
        pairs = self._forecaster.forecast(queries)
        for request, pair, packed_features in zip(batch, pairs, packed, strict=True):
            self._add_pending(request, pair, packed_features)
        return [ImmediateForecast(pair, WORDS if pair.by_model else PLAIN) for pair in pairs]

    def _answer_from_cache(self, request: ForecastQuery, hit: CachedForecast) -> ImmediateForecast:
        """Answers from the cache; queues the prompt again if the models have changed since."""
        [by_history] = self._forecaster.by_history([request.query])
        pair = self._forecaster.choose(request.query, hit.by_model, by_history)
        if hit.edition == self._forecaster.edition:
            self._add_pending(request, pair, hit.packed)
        else:
            self._add_pending(request, pair)
            self._queue_unread(request)
        return ImmediateForecast(pair, REMEMBERED)

    def _answer_unread(self, request: ForecastQuery, pair: ForecastPair) -> ImmediateForecast:
        self._add_pending(request, pair)
        self._queue_unread(request)
        return ImmediateForecast(pair, WORDS if pair.by_model else PLAIN)

    def _add_pending(self, request: ForecastQuery, pair: ForecastPair, packed: bytes = b"") -> None:
        prompt = request.query.prompt if self._keeps_text else None
        self._pending.put(request.request_id, PendingForecast(pair, packed, prompt))

    def _queue_unread(self, request: ForecastQuery) -> None:
        """Queues the prompt if there is text that was not read for this request yet."""
        name = request.request_id
        pending = self._pending.get(name)
        if (
            self._reads
            and request.query.prompt
            and pending
            and not pending.packed
            and name not in self._in_progress
        ):
            self.unread.put(name, request)

    def _improve(self, request: ForecastQuery, reading: PromptReading) -> ForecastPair | None:
        """Updates the pending forecast; returns the new pair, None without a model's forecast."""
        pending = self._pending.get(request.request_id)
        if pending is None or not reading.packed:
            return None
        pair = pending.pair
        if reading.by_model:
            pair = self._forecaster.choose(request.query, reading.by_model, pair.by_history)
        self._pending.amend(request.request_id, replace(pending, pair=pair, packed=reading.packed))
        return pair if reading.by_model else None

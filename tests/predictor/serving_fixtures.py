"""A two-stage forecaster driven without its thread."""

from collections.abc import Sequence

from services.core import FinishReason, LiveAnswers, Outcome
from services.forecast import Forecast, certain
from services.predictor.blend.guarded_forecaster import GuardedForecaster
from services.predictor.encoder.extract import Extractor
from services.predictor.encoder.packing import pack
from services.predictor.interface import Example, Prompt, Query
from services.predictor.models.history import HistoryPredictor
from services.predictor.serving.forecast_cache import ForecastCache
from services.predictor.serving.forecaster import (
    ForecastQuery,
    PromptReading,
    ReadingResult,
    TwoStageForecaster,
)
from services.predictor.serving.pending import PendingForecasts
from tests.predictor.predictor_serving import HashEncoder

FEATURES = Extractor(HashEncoder()).extract([Prompt("be brief", "hello", 5)])[0]
PACKED = pack(FEATURES)


class Model:
    """Forecasts 9 tokens for read prompts, and 30 by words if enabled."""

    version = 0

    def __init__(self, edition: int = 1, words: bool = False):
        self.edition, self.words = edition, words

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        return [certain(9, "model") for _ in batch]

    def by_words(self, batch: Sequence[Query]) -> list[Forecast | None]:
        return [certain(30, "words") if self.words else None for _ in batch]

    def learn(self, examples: Sequence[Example]) -> int:
        return len(examples)

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Does nothing."""


class ForecasterHarness:
    """A two-stage forecaster that records its reading results."""

    def __init__(self, model: Model | None = None, unread_max: int = 100):
        self.model = model or Model()
        self.guarded = GuardedForecaster(HistoryPredictor(), self.model)
        self.pending = PendingForecasts(100)
        self.reported: list[ReadingResult] = []
        self.two_stage = TwoStageForecaster(
            self.guarded,
            self.pending,
            ForecastCache(50),
            unread_max,
            True,
            False,
            self.reported.append,
        )

    def ask(self, name: str, text: str | None = None) -> tuple[str, str]:
        prompt = Prompt("", text or name, 3)
        query = Query("demo", "", 3, 99, prompt=prompt)
        [answer] = self.two_stage.answer([ForecastQuery(name, query, 1.0)])
        return answer.stage, answer.pair.given.source

    def end(self, name: str, reason: FinishReason = FinishReason.STOP) -> None:
        outcome = Outcome(name, "demo", "", 3, 7, 99, reason, 1.0, 0)
        self.two_stage.end(outcome, self.pending.pop(name), 5.0)

    def next_batch(self, most: int = 8) -> list[ForecastQuery]:
        return self.two_stage.next_batch(most)

    def read(self, batch: Sequence[ForecastQuery]) -> ReadingResult:
        message = [
            PromptReading(FEATURES, PACKED, None if a.ended_request else certain(9, "model"))
            for a in batch
        ]
        self.two_stage.read(batch, message)
        return self.reported[-1]


def names(batch: Sequence[ForecastQuery]) -> list[str]:
    return [asked.request_id for asked in batch]

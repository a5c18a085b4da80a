"""A cascade without its thread, driven by hand, and what it told."""

from collections.abc import Sequence

from services.core import FinishReason, Outcome
from services.forecast import Forecast, certain
from services.predictor.blend.guard import Guarded
from services.predictor.encoder.extract import Extractor
from services.predictor.encoder.packing import pack
from services.predictor.interface import Example, Prompt, Query
from services.predictor.models.history import HistoryPredictor
from services.predictor.serving.forecast_cache import Remembered
from services.predictor.serving.forecaster import Asked, Cascade, Read, Reading
from services.predictor.serving.pending import Pending
from tests.predictor.predictor_serving import HashEncoder

FEATURES = Extractor(HashEncoder()).extract([Prompt("be brief", "hello", 5)])[0]
PACKED = pack(FEATURES)


class Model:
    """Says 9 tokens of what is read, and 30 by words where it has learnt those."""

    version = 0

    def __init__(self, edition: int = 1, words: bool = False):
        self.edition, self.words = edition, words

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        return [certain(9, "model") for _ in batch]

    def by_words(self, batch: Sequence[Query]) -> list[Forecast | None]:
        return [certain(30, "words") if self.words else None for _ in batch]

    def learn(self, examples: Sequence[Example]) -> int:
        return len(examples)


class Machine:
    """A cascade, and what it told."""

    def __init__(self, model: Model | None = None, unread_max: int = 100):
        self.model = model or Model()
        self.guarded = Guarded(self.model, HistoryPredictor())
        self.pending = Pending(100)
        self.told: list[Read] = []
        self.cascade = Cascade(
            self.guarded, self.pending, Remembered(50), unread_max, True, False, self.told.append
        )

    def ask(self, name: str, text: str | None = None) -> tuple[str, str]:
        prompt = Prompt("", text or name, 3)
        query = Query("demo", "", 3, 99, prompt=prompt)
        [answer] = self.cascade.answer([Asked(name, query, 1.0)])
        return answer.stage, answer.made.given.source

    def end(self, name: str, reason: FinishReason = FinishReason.STOP) -> None:
        outcome = Outcome(name, "demo", "", 3, 7, 99, reason, 1.0, 0)
        self.cascade.end(outcome, self.pending.pop(name), 5.0)

    def take(self, most: int = 8) -> list[Asked]:
        return self.cascade.take(most)

    def read(self, batch: Sequence[Asked]) -> Read:
        said = [Reading(FEATURES, PACKED, None if a.late else certain(9, "model")) for a in batch]
        self.cascade.read(batch, said)
        return self.told[-1]


def names(batch: Sequence[Asked]) -> list[str]:
    return [asked.request_id for asked in batch]

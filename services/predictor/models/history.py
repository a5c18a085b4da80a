"""History predictor: recent lengths forecast the next ones (Past-Future Scheduler, Gong et al.,
ASPLOS 2025, §3.2, Eq. 1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from services.forecast import Forecast
from services.lengths import LEARNABLE_REASONS, LengthWindow
from services.predictor.interface import Example, Options, Query
from services.runtime.bounded_dict import BoundedDict

SOURCE = "history"
DEFAULTS = Options()

Key = tuple[str, str]  # model, application; an empty application means the whole model


@dataclass
class _Population:
    """Recent lengths of one key; `version` counts all lengths added."""

    shared_key: str
    lengths: LengthWindow
    version: int = 0

    def add(self, example: Example) -> None:
        self.lengths.add(example.output_tokens, example.reason, example.query.max_tokens)
        self.version += 1

    def forecast(self) -> Forecast:
        return self.lengths.forecast(SOURCE, self.version, self.shared_key)


class HistoryPredictor:
    """Forecasts from the last `window` output lengths of the same model and application.

    An application with fewer than `application_min` outcomes uses its model's lengths. Before the
    first outcome of a model, a request is expected to reach its max_tokens. At most
    `populations_max` keys are kept; the least recently updated is evicted.

    Forecasts are UNCAPPED and shared: the same object for a key until it learns again.
    """

    def __init__(self, options: Options = DEFAULTS):
        self._options = options
        self._populations = BoundedDict[Key, _Population](options.populations_max)
        self.version = 0

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        return [self._forecast(self._key_for(query)) for query in batch]

    def learn(self, examples: Sequence[Example]) -> int:
        fit = [e for e in examples if e.reason in LEARNABLE_REASONS and e.output_tokens > 0]
        for example in fit:
            query = example.query
            for key in {(query.model, ""), (query.model, query.application)}:
                self._population(key).add(example)
        self.version += len(fit)
        return len(fit)

    def _key_for(self, query: Query) -> Key:
        known = self._populations.get((query.model, query.application))
        if known is not None and len(known.lengths) >= self._options.application_min:
            return query.model, query.application
        return query.model, ""

    def _forecast(self, key: Key) -> Forecast:
        population = self._populations.get(key)
        return (population or self._empty(key)).forecast()

    def _population(self, key: Key) -> _Population:
        population = self._populations.pop(key, None) or self._empty(key)
        self._populations[key] = population
        return population

    def _empty(self, key: Key) -> _Population:
        return _Population(
            _shared_key(key), LengthWindow(self._options.window, self._options.prior)
        )


def _shared_key(key: Key) -> str:
    """`history/<model>[/<application>]`, with slashes in names escaped."""
    return "/".join([SOURCE, *(quote(part, safe="") for part in key if part)])

"""History predictor: recent lengths forecast the next ones (Past-Future Scheduler, Gong et al.,
ASPLOS 2025, §3.2, Eq. 1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from services.core import LiveAnswers
from services.forecast import Forecast
from services.lengths import LengthWindow, is_learnable
from services.predictor.interface import Example, Options, Query
from services.runtime.bounded_dict import BoundedDict

SOURCE = "history"
DEFAULTS = Options()

Key = tuple[str, str]  # model, application; an empty application means the whole model


@dataclass
class _Population:
    """Recent lengths of one key; `version` increases with every change."""

    shared_key: str
    lengths: LengthWindow
    version: int = 0

    def add(self, example: Example) -> None:
        self.lengths.add(example.output_tokens, example.reason, example.query.max_tokens)
        self.version += 1

    def observe_live(self, tokens: Sequence[int]) -> bool:
        """Returns whether the forecast may change."""
        changes = self.lengths.observe_live(tokens)
        self.version += changes
        return changes

    def forecast(self) -> Forecast:
        return self.lengths.forecast(SOURCE, self.version, self.shared_key)


class HistoryPredictor:
    """Forecasts from the last `window` output lengths of the same model and application, and from
    their live answers.

    An application with fewer than `application_min` outcomes uses its model's lengths. Before the
    first outcome of a model, a request is expected to reach its max_tokens. At most
    `populations_max` keys are kept; the least recently updated is evicted.

    Forecasts are UNCAPPED and shared: the same object for a key until its forecast changes.
    """

    def __init__(self, options: Options = DEFAULTS):
        self._options = options
        self._populations = BoundedDict[Key, _Population](options.populations_max)
        self.version = 0

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        return [self._find_population(query).forecast() for query in batch]

    def learn(self, examples: Sequence[Example]) -> int:
        usable = [example for example in examples if is_learnable(example)]
        for example in usable:
            query = example.query
            for key in {(query.model, ""), (query.model, query.application)}:
                population = self._populations.pop(key, None) or self._empty(key)
                population.add(example)
                self._populations[key] = population  # the newest entry
        self.version += len(usable)
        return len(usable)

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        live: dict[Key, list[int]] = {}
        for each in answers:
            for key in {(each.model, ""), (each.model, each.application)}:
                live.setdefault(key, []).extend(each.output_tokens)
        changes = [
            population.observe_live(live.get(key, ()))
            for key, population in self._populations.items()
        ]
        self.version += any(changes)

    def _find_population(self, query: Query) -> _Population:
        application = self._populations.get((query.model, query.application))
        if application and len(application.lengths) >= self._options.application_min:
            return application
        key = (query.model, "")
        return self._populations.get(key) or self._empty(key)

    def _empty(self, key: Key) -> _Population:
        return _Population(
            _shared_key(key), LengthWindow(self._options.window, self._options.prior)
        )


def _shared_key(key: Key) -> str:
    """`history/<model>[/<application>]`, with slashes in names escaped."""
    return "/".join([SOURCE, *(quote(part, safe="") for part in key if part)])

"""Past-Future's predictor (papers/000 §3.2, Eq. 1): recent answers foretell the next ones."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from services.forecast import Forecast, certain, from_lengths
from services.predictor.interface import LEARNT_FROM, Example, Options, Query

SOURCE = "history"
DEFAULTS = Options()

Key = tuple[str, str]  # model, application; the application is empty for all of a model


@dataclass
class _Population:
    """The last lengths of one key, and the forecast they make, built when first asked for."""

    shared_key: str
    lengths: deque[int]
    version: int = 0
    _forecast: Forecast | None = field(default=None, repr=False)

    def add(self, length: int) -> None:
        self.lengths.append(length)
        self.version += 1
        self._forecast = None

    def forecast(self) -> Forecast:
        if self._forecast is None:
            reach = max(self.lengths)
            self._forecast = from_lengths(
                self.lengths, reach, SOURCE, self.version, self.shared_key
            )
        return self._forecast


class HistoryPredictor:
    """The empirical distribution of the last `window` output lengths, by model and application.

    An application with fewer than `application_min` outcomes is forecast by its model's. Before
    any outcome of the model, a request is expected to run to its max_tokens. At most
    `populations_max` keys are kept; the one that has learnt nothing for longest goes first.

    A forecast costs O(window · log window) once after each new outcome, O(1) until the next.
    """

    def __init__(self, options: Options = DEFAULTS):
        self._options = options
        self._populations: OrderedDict[Key, _Population] = OrderedDict()
        self.version = 0

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        made: dict[tuple[Key, int], Forecast] = {}
        forecasts = []
        for query in batch:
            key = self._key_for(query)
            if (key, query.max_tokens) not in made:
                made[key, query.max_tokens] = self._forecast(key, query.max_tokens)
            forecasts.append(made[key, query.max_tokens])
        return forecasts

    def learn(self, examples: Sequence[Example]) -> int:
        fit = [e for e in examples if e.reason in LEARNT_FROM and e.output_tokens > 0]
        for example in fit:
            query = example.query
            for key in {(query.model, ""), (query.model, query.application)}:
                self._population(key).add(example.output_tokens)
        self.version += len(fit)
        return len(fit)

    def _key_for(self, query: Query) -> Key:
        known = self._populations.get((query.model, query.application))
        if known is not None and len(known.lengths) >= self._options.application_min:
            return query.model, query.application
        return query.model, ""

    def _forecast(self, key: Key, max_tokens: int) -> Forecast:
        population = self._populations.get(key)
        if population is None:
            return replace(certain(max_tokens, SOURCE), shared_key=_shared_key(key))
        learnt = population.forecast()
        return learnt.truncated(max(max_tokens, learnt.max_tokens))

    def _population(self, key: Key) -> _Population:
        if key not in self._populations:
            lengths: deque[int] = deque(maxlen=self._options.window)
            self._populations[key] = _Population(_shared_key(key), lengths)
        self._populations.move_to_end(key)
        if len(self._populations) > self._options.populations_max:
            self._populations.popitem(last=False)
        return self._populations[key]


def _shared_key(key: Key) -> str:
    """`history/<model>[/<application>]`; a slash inside a name is escaped, so no two collide."""
    return "/".join([SOURCE, *(quote(part, safe="") for part in key if part)])

"""Judge a predictor: teach it, ask it, score it; in its domain and out of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from lab.data.examples import BATCH, Tell
from lab.data.rows import Row
from lab.data.split import is_validation
from lab.evaluation.scores import Scores, score
from lab.evaluation.timing import Fresh, Timing, time_forecasts
from services.forecast import Forecast, certain
from services.predictor.interface import Example, Predictor
from services.predictor.models.oracle import SOURCE as ORACLE

TEACH_BATCH = 256
ONLINE_CHUNK = 50
ONLINE_REFIT = 250  # outcomes between two fits
BLIND = frozenset({"history", "max", ORACLE})  # read no prompt: need no encoder

T = TypeVar("T")
Make = Callable[[], Predictor]


@runtime_checkable
class Fits(Protocol):
    """A predictor too heavy to learn at once: it refits from what it has been taught, and tells
    `tick` which share of that is done."""

    def fit(self, tick: Callable[[float], None]) -> None: ...


@dataclass(frozen=True)
class JudgedSet:
    """A data set to judge on: its rows, and the finished requests they stand for."""

    name: str
    in_domain: bool
    rows: Sequence[Row]
    examples: Sequence[Example]


@dataclass(frozen=True)
class Online:
    """Scores on the validation rows after `outcomes` of the set's other rows were learnt from."""

    outcomes: int
    scores: Scores


@dataclass(frozen=True)
class Judgement:
    """How a predictor did on a data set. Timing is missing for the oracle, online in domain."""

    data: str
    predictor: str
    in_domain: bool
    n_train: int
    scores: Scores
    timing: Timing | None = None
    online: Online | None = None


@dataclass(frozen=True)
class Bench:
    """What every predictor is judged with; the same for all of them."""

    train: Sequence[Example]
    sets: Sequence[JudgedSet]
    max_tokens: int
    online_outcomes: int
    seed: int
    fresh: Fresh | None
    tell: Tell

    def judge(self, name: str, make: Make) -> Iterator[Judgement]:
        """A judgement a data set. Every set is forecast before any is learnt from; a set outside
        the training then teaches a predictor that knows the training and no other set."""
        predictor = self._taught(name, make)
        plain = [self._judged(name, predictor, part) for part in self.sets]
        spare: Predictor | None = predictor
        for part, (scores, timing) in zip(self.sets, plain, strict=True):
            online = None
            if not part.in_domain and self.online_outcomes:
                online = self._online(name, spare or self._taught(name, make), part)
                spare = None  # it knows that set now
            yield Judgement(
                part.name, name, part.in_domain, len(self.train), scores, timing, online
            )

    def judge_oracle(self) -> Iterator[Judgement]:
        """The bound: what cannot be beaten, because it is told the judged rows themselves."""
        for part in self.sets:
            lengths = _lengths(part.examples)
            scores = score([certain(length, ORACLE) for length in lengths], lengths)
            yield Judgement(part.name, ORACLE, part.in_domain, 0, scores)

    def _taught(self, name: str, make: Make) -> Predictor:
        predictor = make()
        for done, chunk in _chunks(self.train, TEACH_BATCH):
            self.tell(f"{name}: learning", done, len(self.train))
            predictor.learn(chunk)
        self._fit(name, predictor)
        return predictor

    def _fit(self, name: str, predictor: Predictor) -> None:
        if isinstance(predictor, Fits):
            predictor.fit(lambda share: self.tell(f"{name}: fitting", round(100 * share), 100))

    def _judged(self, name: str, predictor: Predictor, part: JudgedSet) -> tuple[Scores, Timing]:
        scores = self._scored(f"{name}: {part.name}", predictor, part.examples)
        self.tell(f"{name}: timing", 0, 0)
        fresh = None if name in BLIND else self.fresh
        return scores, time_forecasts(predictor, part.rows, self.max_tokens, fresh)

    def _scored(self, what: str, predictor: Predictor, examples: Sequence[Example]) -> Scores:
        forecasts: list[Forecast] = []
        for done, chunk in _chunks(examples, BATCH):
            self.tell(what, done, len(examples))
            forecasts += forecast_within(predictor, chunk)
        return score(forecasts, _lengths(examples))

    def _online(self, name: str, predictor: Predictor, part: JudgedSet) -> Online | None:
        """The rows judged are those judged in domain, so that the two can be compared."""
        unseen = [is_validation(row.prompt) for row in part.rows]
        asked = [e for e, held in zip(part.examples, unseen, strict=True) if held]
        others = [e for e, held in zip(part.examples, unseen, strict=True) if not held]
        if not asked or not others:
            return None
        order = np.random.default_rng(self.seed).permutation(len(others))
        lessons = [others[i] for i in order[: self.online_outcomes]]
        self._teach_online(name, predictor, lessons)
        scores = self._scored(f"{name}: {part.name}, online", predictor, asked)
        return Online(len(lessons), scores)

    def _teach_online(self, name: str, predictor: Predictor, lessons: Sequence[Example]) -> None:
        """As in service: outcomes come in small batches, and a fit every 250 of them."""
        for done, chunk in _chunks(lessons, ONLINE_CHUNK):
            self.tell(f"{name}: learning online", done, len(lessons))
            predictor.learn(chunk)
            learnt = done + len(chunk)
            if learnt % ONLINE_REFIT == 0 or learnt == len(lessons):
                self._fit(name, predictor)


def forecast_within(predictor: Predictor, examples: Sequence[Example]) -> list[Forecast]:
    """Forecasts as a request meets them: cut at its max_tokens."""
    queries = [example.query for example in examples]
    return [
        forecast.truncated(query.max_tokens)
        for forecast, query in zip(predictor.forecast(queries), queries, strict=True)
    ]


def _lengths(examples: Sequence[Example]) -> list[int]:
    return [example.output_tokens for example in examples]


def _chunks(items: Sequence[T], size: int) -> Iterator[tuple[int, Sequence[T]]]:
    """Chunks, each with how many items come before it."""
    return ((start, items[start : start + size]) for start in range(0, len(items), size))

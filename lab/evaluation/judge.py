"""Evaluates a predictor: trains it, forecasts and scores, in domain and out of domain."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from lab.data.examples import BATCH, ReportProgress
from lab.data.rows import Row
from lab.data.split import is_validation
from lab.evaluation.scores import Scores, score
from lab.evaluation.timing import MakeExtractor, Timing, time_forecasts
from services.forecast import Forecast, certain
from services.predictor.interface import Example, Predictor
from services.predictor.models.oracle import SOURCE as ORACLE

LEARN_BATCH = 256
ONLINE_CHUNK = 50
ONLINE_REFIT = 250  # outcomes between two fits
PROMPTLESS = frozenset({"history", "max", ORACLE})  # read no prompts and need no encoder

T = TypeVar("T")
Make = Callable[[], Predictor]


@runtime_checkable
class Refits(Protocol):
    """A predictor that must be fitted after learning; `tick` receives the share of work done."""

    def fit(self, tick: Callable[[float], None]) -> None: ...


@dataclass(frozen=True)
class JudgedSet:
    """A data set to evaluate: its rows and the matching examples."""

    name: str
    in_domain: bool
    rows: Sequence[Row]
    examples: Sequence[Example]


@dataclass(frozen=True)
class Online:
    """Scores on the validation rows after learning `outcomes` of the set's other rows."""

    outcomes: int
    scores: Scores


@dataclass(frozen=True)
class Judgement:
    """Accuracy of a predictor on a data set. The oracle has no timing; in-domain sets have no
    online scores."""

    data: str
    predictor: str
    in_domain: bool
    n_train: int
    scores: Scores
    timing: Timing | None = None
    online: Online | None = None


@dataclass(frozen=True)
class PredictorEvaluator:
    """Evaluation settings that all predictors share."""

    train: Sequence[Example]
    sets: Sequence[JudgedSet]
    max_tokens: int
    online_outcomes: int
    seed: int
    make_extractor: MakeExtractor | None
    progress: ReportProgress

    def judge(self, name: str, make: Make) -> Iterator[Judgement]:
        """Yields one judgement per data set. The predictor forecasts all sets before it learns from
        any. Online learning on an out-of-domain set starts from a predictor trained only on the
        training set."""
        predictor = self._train(name, make)
        plain = [self._judge_set(name, predictor, part) for part in self.sets]
        unused: Predictor | None = predictor
        for part, (scores, timing) in zip(self.sets, plain, strict=True):
            online = None
            if not part.in_domain and self.online_outcomes:
                online = self._judge_online(name, unused or self._train(name, make), part)
                unused = None  # it has learned from this set
            yield Judgement(
                part.name, name, part.in_domain, len(self.train), scores, timing, online
            )

    def judge_oracle(self) -> Iterator[Judgement]:
        """Yields the upper bound: a predictor that knows the true lengths."""
        for part in self.sets:
            lengths = _lengths(part.examples)
            scores = score([certain(length, ORACLE) for length in lengths], lengths)
            yield Judgement(part.name, ORACLE, part.in_domain, 0, scores)

    def _train(self, name: str, make: Make) -> Predictor:
        predictor = make()
        for done, chunk in _chunks(self.train, LEARN_BATCH):
            self.progress(f"{name}: learning", done, len(self.train))
            predictor.learn(chunk)
        self._fit(name, predictor)
        return predictor

    def _fit(self, name: str, predictor: Predictor) -> None:
        if isinstance(predictor, Refits):
            predictor.fit(lambda share: self.progress(f"{name}: fitting", round(100 * share), 100))

    def _judge_set(self, name: str, predictor: Predictor, part: JudgedSet) -> tuple[Scores, Timing]:
        scores = self._score(f"{name}: {part.name}", predictor, part.examples)
        self.progress(f"{name}: timing", 0, 0)
        make_extractor = None if name in PROMPTLESS else self.make_extractor
        return scores, time_forecasts(predictor, part.rows, self.max_tokens, make_extractor)

    def _score(self, task: str, predictor: Predictor, examples: Sequence[Example]) -> Scores:
        forecasts: list[Forecast] = []
        for done, chunk in _chunks(examples, BATCH):
            self.progress(task, done, len(examples))
            queries = [example.query for example in chunk]
            forecasts += [
                forecast.truncated(query.max_tokens)
                for forecast, query in zip(predictor.forecast(queries), queries, strict=True)
            ]
        return score(forecasts, _lengths(examples))

    def _judge_online(self, name: str, predictor: Predictor, part: JudgedSet) -> Online | None:
        """Scores the rows that an in-domain run scores, so that both are comparable."""
        validation: list[Example] = []
        others: list[Example] = []
        for row, example in zip(part.rows, part.examples, strict=True):
            (validation if is_validation(row.prompt) else others).append(example)
        if not validation or not others:
            return None
        order = np.random.default_rng(self.seed).permutation(len(others))
        outcomes = [others[i] for i in order[: self.online_outcomes]]
        self._learn_online(name, predictor, outcomes)
        scores = self._score(f"{name}: {part.name}, online", predictor, validation)
        return Online(len(outcomes), scores)

    def _learn_online(self, name: str, predictor: Predictor, outcomes: Sequence[Example]) -> None:
        """Learns as the service does: outcomes in small batches with a fit every ONLINE_REFIT."""
        for done, chunk in _chunks(outcomes, ONLINE_CHUNK):
            self.progress(f"{name}: learning online", done, len(outcomes))
            predictor.learn(chunk)
            learned = done + len(chunk)
            if learned % ONLINE_REFIT == 0 or learned == len(outcomes):
                self._fit(name, predictor)


def _lengths(examples: Sequence[Example]) -> list[int]:
    return [example.output_tokens for example in examples]


def _chunks(items: Sequence[T], size: int) -> Iterator[tuple[int, Sequence[T]]]:
    """Yields chunks with the number of items before each."""
    return ((start, items[start : start + size]) for start in range(0, len(items), size))

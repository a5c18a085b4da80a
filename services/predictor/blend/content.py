"""A predictor that reads prompts: one member, or several weighted by a mixture."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.core import LiveAnswers
from services.forecast import Forecast
from services.lengths import is_learnable
from services.predictor.blend.members import Member
from services.predictor.blend.mixture import Mixture
from services.predictor.blend.quantile_cache import QuantileCache
from services.predictor.encoder.extract import without_embeddings, word_features
from services.predictor.interface import Example, Features, Options, Predictor, Query
from services.predictor.models.fitting import Fit, Fitted, Model, ProgressCallback, ignore_progress
from services.predictor.models.frame import Frame
from services.predictor.models.history import HistoryPredictor
from services.predictor.models.oracle import OraclePredictor
from services.predictor.models.spread import Floats, forecasts

MIN_EXAMPLES_TO_FIT = 64
MAX_PROMPTS_BY_WORDS = 64  # per call
WORDS = "words"  # source of forecasts from words alone
_JUDGED = 8_000  # latest examples, used to weigh members


@dataclass(frozen=True)
class Refit:
    """A fit of all members as a value that another process can run."""

    fits: Mapping[str, Fit]
    examples: tuple[Example, ...]
    seed: int
    by_words: Fit | None = None

    def run(self, tick: ProgressCallback = ignore_progress) -> "Refitted":
        frame = Frame.from_queries([example.query for example in self.examples])
        lengths = np.array([float(example.output_tokens) for example in self.examples])
        fitted: dict[str, Fitted] = {}
        for number, (name, fit) in enumerate(self.fits.items()):

            def tick_all(share: float, before: int = number) -> None:
                tick((before + share) / len(self.fits))

            fitted[name] = fit(frame, lengths, self.seed, tick_all)
        refitted = Refitted.weigh(fitted, frame.applications, lengths)
        if self.by_words:
            words = self.by_words(frame, lengths, self.seed, ignore_progress)
        elif WORDS in fitted:
            words = fitted[WORDS]
        else:
            return refitted
        return replace(refitted, by_words=words.model)


@dataclass(frozen=True)
class Refitted:
    """New models and their mixture, weighted by out-of-fold forecasts."""

    models: Mapping[str, Model]
    mixture: Mixture
    examples: int
    by_words: Model | None = None

    @staticmethod
    def weigh(
        fitted: Mapping[str, Fitted], applications: Sequence[str], lengths: Floats
    ) -> "Refitted":
        """Weighs the models on the latest examples, in 1 to 2 s for 8,000."""
        mixture = Mixture(len(fitted))
        out_of_fold = [each.out_of_fold[-_JUDGED:] for each in fitted.values()]
        mixture.start(out_of_fold, applications[-_JUDGED:], lengths[-_JUDGED:])
        models = {name: each.model for name, each in fitted.items()}
        return Refitted(models, mixture, len(lengths))


class ContentPredictor:
    """Forecasts with the ready members; with history when none is ready or the prompt was not read.
    A pure one forecasts `max_tokens` instead of history, and does not recalibrate a single member.

    `learn` is fast: it updates members that learn online, stores examples for the next fit, and
    updates the mixture with each member's earlier forecast. `refit` returns the slow work as a
    value; `adopt` installs its result.
    """

    def __init__(
        self,
        name: str,
        members: Mapping[str, Member],
        options: Options,
        fit_words: Fit | None = None,
    ):
        self.version = 0
        self._fit_words = fit_words
        self._by_words: Model | None = None
        self._name = name
        self._members = dict(members)
        self._unread: Predictor = OraclePredictor() if options.pure else HistoryPredictor(options)
        self._recalibrates = not options.pure or len(self._members) > 1
        self._examples: deque[Example] = deque(maxlen=options.examples)
        self.pending = 0  # examples since the last refit
        self._ready: tuple[str, ...] = ()
        self._mixture = Mixture(0)
        self._cache = QuantileCache()

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        rows = [i for i, query in enumerate(batch) if self._ready and query.features is not None]
        results = self._unread.forecast(batch)
        if rows:
            queries = [batch[i] for i in rows]
            spreads = self._cache.spreads(queries, self._member_spreads)
            spread = self._combine(queries, spreads) if self._recalibrates else spreads[0]
            for i, forecast in zip(rows, forecasts(spread, self._name, self.version), strict=True):
                results[i] = forecast
        return results

    def by_words(self, batch: Sequence[Query]) -> list[Forecast | None]:
        """Forecasts from words alone; None without a prompt and before the first fit.

        At most MAX_PROMPTS_BY_WORDS prompts, 0.1 ms each. It only reads state that no other method
        changes in place, so it may run while another method runs in a different thread.
        """
        model, results = self._by_words, list[Forecast | None]([None] * len(batch))
        rows = [i for i, query in enumerate(batch) if query.prompt][:MAX_PROMPTS_BY_WORDS]
        if model and rows:
            spread = model.spread(_unread([batch[i] for i in rows]))
            for i, forecast in zip(rows, forecasts(spread, WORDS, self.version), strict=True):
                results[i] = forecast
        return results

    @property
    def edition(self) -> int:
        """Increases when the forecast of a known prompt may change: after a fit and after enough
        outcomes."""
        return self._cache.edition

    def learn(self, examples: Sequence[Example]) -> int:
        usable = [example for example in examples if is_learnable(example)]
        self.version += len(usable)
        self._unread.learn(usable)
        if read := [e for e in usable if e.query.features is not None]:
            self._learn_read(read)
        return len(usable)

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        self._unread.observe_live(answers)

    def refit(self, seed: int = 0) -> Refit | None:
        """Returns the next fit, or None while there are too few examples."""
        if len(self._examples) < MIN_EXAMPLES_TO_FIT:
            return None
        self.pending = 0
        fits = {name: member.fit for name, member in self._members.items()}
        return Refit(fits, tuple(self._examples), seed, self._fit_words)

    def adopt(self, refitted: Refitted) -> None:
        """Installs the new models and their mixture."""
        for name, model in refitted.models.items():
            self._members[name].adopt(model)
        self._ready = tuple(refitted.models)
        self._mixture = refitted.mixture
        self._by_words = refitted.by_words or self._by_words
        self._cache.clear()
        self.version += 1

    def forget(self) -> None:
        """Clears the cache of the members' quantiles."""
        self._cache.clear()

    def fit(self, tick: ProgressCallback = ignore_progress) -> None:
        """Refits synchronously, for benchmarks and tests."""
        if refit := self.refit():
            self.adopt(refit.run(tick))

    @property
    def members(self) -> Mapping[str, Member]:
        """Ready members by name."""
        return {name: self._members[name] for name in self._ready}

    def weights(self, application: str) -> dict[str, float]:
        """Weight of each member for an application."""
        return dict(zip(self._ready, self._mixture.weights(application).tolist(), strict=True))

    def _learn_read(self, examples: Sequence[Example]) -> None:
        queries = [example.query for example in examples]
        frame = Frame.from_queries(queries)
        if self._ready and self._recalibrates:
            lengths = np.array([float(example.output_tokens) for example in examples])
            spreads = self._cache.spreads(queries, self._member_spreads)
            self._mixture.observe(spreads, frame.applications, lengths)
        for member in self._members.values():
            member.learn(frame, examples)
        self._cache.count_outcomes(len(examples))
        self._examples.extend(examples)
        self.pending += len(examples)

    def _combine(self, queries: Sequence[Query], spreads: Sequence[Floats]) -> Floats:
        return self._mixture.combine(spreads, tuple(q.application for q in queries))

    def _member_spreads(self, queries: Sequence[Query]) -> list[Floats]:
        frame = Frame.from_queries(queries)
        return [self._members[name].spread(frame) for name in self._ready]


def _unread(queries: Sequence[Query]) -> Frame:
    """Returns a frame of words and sizes alone."""
    return Frame.from_queries([replace(q, features=_word_features(q)) for q in queries])


def _word_features(query: Query) -> Features | None:
    if query.features:
        return without_embeddings(query.features)
    return word_features(query.prompt) if query.prompt else None

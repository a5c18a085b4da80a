"""The predictor that reads prompts: one member, or several and the mixture that weighs them."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.forecast import Forecast
from services.lengths import LEARNABLE_REASONS
from services.predictor.blend.members import Member
from services.predictor.blend.mixture import Mixture
from services.predictor.blend.quantile_cache import Recall
from services.predictor.encoder.extract import without_meaning, wording
from services.predictor.interface import Example, Features, Options, Query
from services.predictor.models.fitting import Fit, Fitted, Model, Tick, untold
from services.predictor.models.frame import Frame
from services.predictor.models.history import HistoryPredictor
from services.predictor.models.spread import Floats, forecasts

LEAST_TO_FIT = 64  # examples
WORDS_MOST = 64  # prompts of one call told by their words
WORDS = "words"  # the source of such forecasts
_JUDGED = 8_000  # the last examples, on which members are weighed


@dataclass(frozen=True)
class Refit:
    """Everything that has to be fitted anew, as a value that another process can run."""

    fits: Mapping[str, Fit]
    examples: tuple[Example, ...]
    seed: int
    by_words: Fit | None = None

    def run(self, tick: Tick = untold) -> "Refitted":
        frame = Frame.of([example.query for example in self.examples])
        lengths = np.array([float(example.output_tokens) for example in self.examples])
        done: dict[str, Fitted] = {}
        for number, (name, fit) in enumerate(self.fits.items()):

            def portion(share: float, before: int = number) -> None:
                tick((before + share) / len(self.fits))

            done[name] = fit(frame, lengths, self.seed, portion)
        refitted = Refitted.weigh(done, frame.applications, lengths)
        if self.by_words is None:
            return replace(refitted, by_words=done[WORDS].model if WORDS in done else None)
        return replace(refitted, by_words=self.by_words(frame, lengths, self.seed, untold).model)


@dataclass(frozen=True)
class Refitted:
    """New models, and how far each is believed, by what it said of examples unseen."""

    models: Mapping[str, Model]
    mixture: Mixture
    examples: int
    by_words: Model | None = None

    @staticmethod
    def weigh(
        fitted: Mapping[str, Fitted], applications: Sequence[str], lengths: Floats
    ) -> "Refitted":
        """By the last examples; a second or two for 8,000 of them."""
        mixture = Mixture(len(fitted))
        unseen = [each.unseen[-_JUDGED:] for each in fitted.values()]
        mixture.start(unseen, applications[-_JUDGED:], lengths[-_JUDGED:])
        models = {name: each.model for name, each in fitted.items()}
        return Refitted(models, mixture, len(lengths))


class ContentPredictor:
    """Forecasts by the members that are ready; by plain history where none is or no text was read.

    `learn` is quick: members that learn at once do, examples are kept for the next fit, and the
    mixture is told how each member's spread, made before, has fared. `refit` gives the slow work
    as a value; `adopt` swaps its result in at once.
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
        self._history = HistoryPredictor(options)
        self._examples: deque[Example] = deque(maxlen=options.examples)
        self._new = 0
        self._ready: tuple[str, ...] = ()
        self._mixture = Mixture(0)
        self._recall = Recall()

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        read = [i for i, query in enumerate(batch) if self._ready and query.features is not None]
        forecast = self._history.forecast(batch)
        if read:
            queries = [batch[i] for i in read]
            spreads = self._recall.spreads(queries, self._ask)
            spread = self._mixture.combine(spreads, tuple(q.application for q in queries))
            for i, made in zip(read, forecasts(spread, self._name, self.version), strict=True):
                forecast[i] = made
        return forecast

    def by_words(self, batch: Sequence[Query]) -> list[Forecast | None]:
        """What words alone tell of prompts; None where there is no prompt, and before the first
        fit. Of the first WORDS_MOST prompts: each takes some 0.1 ms. It reads what no other
        call changes, so it may be called while one runs in another thread."""
        model, told = self._by_words, [None] * len(batch)
        rows = [i for i, query in enumerate(batch) if query.prompt][:WORDS_MOST]
        if model is None or not rows:
            return [*told]
        spread = model.spread(_unread([batch[i] for i in rows]))
        made = dict(zip(rows, forecasts(spread, WORDS, self.version), strict=True))
        return [made.get(i) for i in range(len(batch))]

    @property
    def edition(self) -> int:
        """Rises when the same prompt may be foretold otherwise: with a fit, and with outcomes."""
        return self._recall.edition

    def learn(self, examples: Sequence[Example]) -> int:
        fit = [e for e in examples if e.reason in LEARNABLE_REASONS and e.output_tokens > 0]
        self.version += len(fit)
        self._history.learn(fit)
        if read := [e for e in fit if e.query.features is not None]:
            self._learn_read(read)
        return len(fit)

    @property
    def pending(self) -> int:
        """Examples that came since the last refit was asked for."""
        return self._new

    def refit(self, seed: int = 0) -> Refit | None:
        """The next fit, or None while there is too little to fit on."""
        if len(self._examples) < LEAST_TO_FIT:
            return None
        self._new = 0
        fits = {name: member.fit for name, member in self._members.items()}
        return Refit(fits, tuple(self._examples), seed, self._fit_words)

    def adopt(self, refitted: Refitted) -> None:
        """Swaps the new models and their mixture in."""
        for name, model in refitted.models.items():
            self._members[name].adopt(model)
        self._ready = tuple(refitted.models)
        self._mixture = refitted.mixture
        if refitted.by_words:
            self._by_words = refitted.by_words
        self._recall.forget()
        self.version += 1

    def forget(self) -> None:
        """What was said of prompts before; the next forecast of each asks the members again."""
        self._recall.forget()

    def fit(self, tick: Tick = untold) -> None:
        """Refits here and now; for benchmarks and tests."""
        if refit := self.refit():
            self.adopt(refit.run(tick))

    @property
    def members(self) -> Mapping[str, Member]:
        """Those that are ready, by name."""
        return {name: self._members[name] for name in self._ready}

    def weights(self, application: str) -> dict[str, float]:
        """How far each member is believed for an application."""
        return dict(zip(self._ready, self._mixture.weights(application).tolist(), strict=True))

    def _learn_read(self, examples: Sequence[Example]) -> None:
        queries = [example.query for example in examples]
        frame = Frame.of(queries)
        if self._ready:
            lengths = np.array([float(example.output_tokens) for example in examples])
            said = self._recall.spreads(queries, self._ask)
            self._mixture.observe(said, frame.applications, lengths)
        for member in self._members.values():
            member.learn(frame, examples)
        self._recall.learnt(len(examples))
        self._examples.extend(examples)
        self._new += len(examples)

    def _ask(self, queries: Sequence[Query]) -> list[Floats]:
        frame = Frame.of(queries)
        return [self._members[name].spread(frame) for name in self._ready]


def _unread(queries: Sequence[Query]) -> Frame:
    """Of prompts their words and sizes, whether or not an encoder has read them."""
    return Frame.of([replace(q, features=_wording(q)) for q in queries])


def _wording(query: Query) -> Features | None:
    if query.features:
        return wording(query.features)
    return without_meaning(query.prompt) if query.prompt else None

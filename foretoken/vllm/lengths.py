"""Forecasts of output lengths in this process: what answers teach, and what prompts say."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.core import LiveAnswers, Outcome, Request
from services.forecast import Forecast, certain
from services.lengths import is_learnable
from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.guard import Application
from services.predictor.blend.guarded_forecaster import ForecastPair, GuardedForecaster
from services.predictor.config import PredictorConfig
from services.predictor.encoder.extract import word_features
from services.predictor.interface import Example, Options, Prompt, Query
from services.predictor.learning.schedule import WORDS, RefitSchedule
from services.predictor.learning.scorecard import excess_loss
from services.predictor.models.history import HistoryPredictor
from services.predictor.predictors import build_reading
from services.runtime.bounded_dict import BoundedDict
from services.scheduler.core import events as ev

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the loggers below its own

HEAD_TOKENS, TAIL_TOKENS = 256, 768  # of a prompt that are read: its first task and its last turn
PENDING_MAX = 65_536  # forecasts of requests that have not ended, about 1 kB each

Decode = Callable[[Sequence[int]], str]
Deliver = Callable[[ev.Forecasted | ev.Refreshed], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to forecast, with its prompt."""

    request: Request
    prompt_ids: Sequence[int]


class Lengths:
    """What forecasts, in the thread of `Learner`. By default it learns nothing."""

    def start(self, deliver: Deliver) -> None:
        """Forecasts that come later than their question go to `deliver`, in any thread."""

    def stop(self) -> None:
        """Ends what `start` began."""

    def forecast(self, asked: Sequence[Asked]) -> list[tuple[str, Forecast]]:
        """The forecasts that are known at once."""
        raise NotImplementedError

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Learns from ended requests."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Requests ended without a complete answer: nothing more is kept for them."""

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Replaces the answers that have not ended."""

    def refit(self, now: float) -> None:
        """Fits models that are due."""


class MaxTokens(Lengths):
    """Expects `max_tokens`, as presets without a predictor do."""

    def forecast(self, asked: Sequence[Asked]) -> list[tuple[str, Forecast]]:
        return [(each.request.request_id, certain(each.request.max_tokens)) for each in asked]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A forecast that was given, to be compared with its outcome."""

    query: Query
    pair: ForecastPair


class LengthLearner(Lengths):
    """Forecasts from the words of prompts once enough answers have ended, before from history.
    Belongs to one thread.

    `decode` returns the text of token ids; without it prompts are not read.
    """

    def __init__(self, decode: Decode | None):
        config = PredictorConfig()
        options = Options(examples=WORDS.examples)
        self._words: ContentPredictor | None = None
        if decode:
            self._words = build_reading("words", options)
        self._forecaster = GuardedForecaster(HistoryPredictor(options), self._words)
        self._decode = decode
        self._pending = BoundedDict[str, _Pending](PENDING_MAX)
        self._schedule = RefitSchedule(
            WORDS.interval_s,
            config.refit_examples_min,
            config.refit_new_min,
            config.refit_new_share,
            config.seed,
        )
        self._fitted_examples = 0
        self._examples = 0
        self._fit_due_s = 0.0

    def forecast(self, asked: Sequence[Asked]) -> list[tuple[str, Forecast]]:
        """About 0.3 ms for each prompt that is read."""
        queries = [self._query(each) for each in asked]
        pairs = self._forecaster.forecast(queries)
        answers = []
        for each, query, pair in zip(asked, queries, pairs, strict=True):
            request = each.request
            self._pending[request.request_id] = _Pending(replace(query, prompt=None), pair)
            given = pair.given
            forecast = given if given.shared_key else given.truncated(request.max_tokens)
            answers.append((request.request_id, forecast))
        return answers

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        examples: list[Example] = []
        excess: dict[Application, list[float]] = {}
        for outcome in outcomes:
            pending = self._pending.pop(outcome.request_id, None)
            query = pending.query if pending else _bare_query(outcome)
            example = Example(query, outcome.output_tokens, outcome.reason)
            if not is_learnable(example):
                continue
            examples.append(example)
            if pending and (by_model := pending.pair.by_model):
                by_history, tokens = pending.pair.by_history, outcome.output_tokens
                loss = excess_loss(by_model, by_history, tokens, outcome.max_tokens)
                excess.setdefault((query.model, query.application), []).append(loss)
        self._examples += self._forecaster.learn(examples)
        self._forecaster.study(examples)
        for application, losses in excess.items():
            if change := self._forecaster.compare(application, losses):
                state = "set aside" if change.set_aside else "used again"
                log.info("foretoken: forecasts from words are %s for %s", state, change.subject)

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._pending.pop(request_id, None)

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        self._forecaster.observe_live(answers)

    def refit(self, now: float) -> None:
        """Fits the model of words when it is due: 50 ms for 2,000 answers."""
        words = self._words
        if words is None or now < self._fit_due_s or self._examples < self._schedule.examples_min:
            return
        if not self._schedule.is_due(words.pending, self._fitted_examples):
            return
        self._fit_due_s = now + self._schedule.interval_s
        if refit := words.refit():
            words.adopt(refit.run())
            self._fitted_examples = len(refit.examples)

    def _query(self, asked: Asked) -> Query:
        request = asked.request
        prompt = features = None
        if self._decode:
            text = read_prompt(asked.prompt_ids, self._decode)
            prompt = Prompt("", text, request.prompt_tokens)
            features = word_features(prompt)
        most = request.max_tokens
        return Query(
            request.model, request.application, request.prompt_tokens, most, features, prompt
        )


def read_prompt(ids: Sequence[int], decode: Decode) -> str:
    """The text of a prompt, of a long one its beginning and its end."""
    if len(ids) <= HEAD_TOKENS + TAIL_TOKENS:
        return decode(ids)
    return f"{decode(ids[:HEAD_TOKENS])}\n{decode(ids[-TAIL_TOKENS:])}"


def _bare_query(outcome: Outcome) -> Query:
    return Query(outcome.model, outcome.application, outcome.prompt_tokens, outcome.max_tokens)

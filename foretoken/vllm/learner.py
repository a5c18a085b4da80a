"""Learns output lengths and step times beside vLLM's loop: a thread that never delays a step."""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from services.core import LiveAnswers, Outcome, Request
from services.costs import CostModel, StepTiming
from services.estimator.state import EstimatorState
from services.forecast import Forecast, certain
from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.guarded_forecaster import ForecastPair, GuardedForecaster
from services.predictor.config import PredictorConfig
from services.predictor.encoder.extract import word_features
from services.predictor.interface import Example, Options, Prompt, Query, is_learnable
from services.predictor.learning.schedule import WORDS, RefitSchedule
from services.predictor.learning.scorecard import excess_loss
from services.predictor.models.history import HistoryPredictor
from services.predictor.predictors import build_reading
from services.runtime.bounded_dict import BoundedDict

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the loggers below its own

HEAD_TOKENS, TAIL_TOKENS = 256, 768  # of a prompt that are read: its first task and its last turn
UNREAD_MAX = 1_024  # prompts waiting for a forecast; the oldest are dropped
PENDING_MAX = 65_536  # forecasts of requests that have not ended, about 1 kB each
TIMINGS_MAX = 4_096
SWITCH_S = 0.0005  # interpreter switch interval: vLLM's loop answers while this thread computes
CHECK_S = 0.05  # between two looks at outcomes and timings
FIT_COST_S = 2.0  # between two fits of step times
ENGINE = "vllm"

Decode = Callable[[Sequence[int]], str]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to forecast, with its prompt."""

    request: Request
    prompt_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A forecast that was given, to be compared with its outcome."""

    query: Query
    pair: ForecastPair


class LengthLearner:
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
        examples, excess = [], []
        for outcome in outcomes:
            pending = self._pending.pop(outcome.request_id, None)
            query = pending.query if pending else _bare_query(outcome)
            example = Example(query, outcome.output_tokens, outcome.reason)
            if not is_learnable(example):
                continue
            examples.append(example)
            if pending and (by_model := pending.pair.by_model):
                by_history, tokens = pending.pair.by_history, outcome.output_tokens
                excess.append(excess_loss(by_model, by_history, tokens, outcome.max_tokens))
        self._examples += self._forecaster.learn(examples)
        self._forecaster.study(examples)
        if excess and self._forecaster.compare(excess):
            state = "set aside" if self._forecaster.set_aside else "used again"
            log.info("foretoken: forecasts from words are %s", state)

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Replaces the answers that have not ended, for history."""
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
            text = _read(asked.prompt_ids, self._decode)
            prompt = Prompt("", text, request.prompt_tokens)
            features = word_features(prompt)
        most = request.max_tokens
        return Query(
            request.model, request.application, request.prompt_tokens, most, features, prompt
        )


def _read(ids: Sequence[int], decode: Decode) -> str:
    if len(ids) <= HEAD_TOKENS + TAIL_TOKENS:
        return decode(ids)
    return f"{decode(ids[:HEAD_TOKENS])}\n{decode(ids[-TAIL_TOKENS:])}"


def _bare_query(outcome: Outcome) -> Query:
    return Query(outcome.model, outcome.application, outcome.prompt_tokens, outcome.max_tokens)


class MaxTokens:
    """Expects `max_tokens`, as presets without a predictor do."""

    def forecast(self, asked: Sequence[Asked]) -> list[tuple[str, Forecast]]:
        return [(each.request.request_id, certain(each.request.max_tokens)) for each in asked]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Lengths change nothing."""

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Nor these."""

    def refit(self, now: float) -> None:
        """There is no model."""


class Learner:
    """The thread. Its inputs never wait; `pop_forecasts` and `pop_cost` return what is there.

    A prompt that waits behind UNREAD_MAX others gets no forecast here; the scheduler expects
    max_tokens of it.
    """

    def __init__(self, lengths: LengthLearner | MaxTokens):
        self._lengths = lengths
        self._costs = EstimatorState(refit_interval_s=FIT_COST_S)
        self._asked: deque[Asked] = deque(maxlen=UNREAD_MAX)
        self._outcomes: deque[Outcome] = deque(maxlen=PENDING_MAX)
        self._timings: deque[StepTiming] = deque(maxlen=TIMINGS_MAX)
        self._forecasts: deque[tuple[str, Forecast]] = deque(maxlen=PENDING_MAX)
        self._cost: deque[CostModel] = deque(maxlen=1)
        self._live: deque[Sequence[LiveAnswers]] = deque(maxlen=1)
        self._wake = threading.Event()
        self._stopping = False
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="foretoken-learner", daemon=True)

    def start(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended, after one fit at most."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def ask(self, asked: Asked) -> None:
        self._asked.append(asked)
        self._wake.set()

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes.extend(outcomes)

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Replaces the answers that have not ended."""
        self._live.append(answers)

    def timed(self, timing: StepTiming) -> None:
        self._timings.append(timing)

    def pop_forecasts(self) -> list[tuple[str, Forecast]]:
        return _pop_all(self._forecasts)

    def pop_cost(self) -> CostModel | None:
        """The newest cost model since the last call."""
        found = _pop_all(self._cost)
        return found[-1] if found else None

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(CHECK_S)
            self._wake.clear()
            try:
                self._turn()
            except Exception:
                if not self._failed:
                    log.exception("foretoken cannot learn from this work (logged once)")
                self._failed = True

    def _turn(self) -> None:
        if asked := _pop_all(self._asked):
            self._forecasts.extend(self._lengths.forecast(asked))
        if outcomes := _pop_all(self._outcomes):
            self._lengths.learn(outcomes)
        for live in _pop_all(self._live):
            self._lengths.observe_live(live)
        now = time.monotonic()
        self._lengths.refit(now)
        if timings := _pop_all(self._timings):
            observed = self._costs.observe(ENGINE, timings, now=now)
            cost = self._costs.model(ENGINE)
            if observed.changed and cost:
                self._cost.append(cost)


def _pop_all(items: "deque[Item]") -> list[Item]:
    return [items.popleft() for _ in range(len(items))]

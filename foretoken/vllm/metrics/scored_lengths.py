"""How good the forecasts of this process are, for its metrics."""

from collections.abc import Sequence

from foretoken.vllm.lengths import PENDING_MAX, Asked, Deliver, Lengths
from services.core import LiveAnswers, Outcome
from services.forecast import Forecast
from services.lengths import is_learnable
from services.predictor.learning.scorecard import Scorecard, judge
from services.predictor.metrics import AccuracyMetrics
from services.runtime.bounded_dict import BoundedDict

SCORES_S = 5.0  # between two summaries, which take milliseconds


class ScoredLengths(Lengths):
    """The forecasts of `lengths`, each compared with its outcome. Belongs to one thread."""

    def __init__(self, lengths: Lengths, metrics: AccuracyMetrics):
        self._lengths = lengths
        self._metrics = metrics
        self._given = BoundedDict[str, Forecast](PENDING_MAX)
        self._scorecard = Scorecard()
        self._scores_due_s = 0.0
        self._outdated = False  # the summary

    def start(self, deliver: Deliver) -> None:
        self._lengths.start(deliver)

    def stop(self) -> None:
        self._lengths.stop()

    def forecast(self, asked: Sequence[Asked]) -> list[tuple[str, Forecast]]:
        answers = self._lengths.forecast(asked)
        for name, forecast in answers:
            self._given[name] = forecast
            self._metrics.forecasts.labels(forecast.source).inc()
        return answers

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """About 0.1 ms for each outcome, beside what `lengths` takes."""
        self._lengths.learn(outcomes)
        learned = [each for each in outcomes if is_learnable(each)]
        self._metrics.count_outcomes(len(learned), len(outcomes) - len(learned))
        for outcome in learned:
            if given := self._given.pop(outcome.request_id, None):
                judged = judge(given, outcome.output_tokens, outcome.max_tokens)
                self._scorecard.add([judged])
                self._metrics.observe_judged(given.source, judged)
                self._outdated = True

    def forget(self, request_ids: Sequence[str]) -> None:
        self._lengths.forget(request_ids)
        for request_id in request_ids:
            self._given.pop(request_id, None)

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        self._lengths.observe_live(answers)

    def refit(self, now: float) -> None:
        self._lengths.refit(now)
        if self._outdated and now >= self._scores_due_s:
            self._outdated, self._scores_due_s = False, now + SCORES_S
            self._metrics.set_scores(self._scorecard.scores())

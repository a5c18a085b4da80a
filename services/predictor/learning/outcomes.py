"""Judges forecasts by their outcomes and creates rows of the outcome log."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from services.core import Outcome
from services.lengths import is_learnable
from services.predictor.blend.guard import Application, Decision
from services.predictor.blend.guarded_forecaster import GuardedForecaster
from services.predictor.learning.records import READ_LATE, encode
from services.predictor.learning.scorecard import JudgedForecast, Scorecard, excess_loss, judge
from services.predictor.serving.forecaster import EndedRequest
from services.predictor.serving.pending import PendingForecast, PendingForecasts
from services.runtime.outcomelog import Row


class OutcomeRecorder:
    """Judges each outcome's forecast and creates its log row.

    on_end: called with each outcome and its pending forecast.
    on_judged: called with the source and the score of each judged forecast.
    """

    def __init__(
        self,
        forecaster: GuardedForecaster,
        pending: PendingForecasts,
        on_end: Callable[[Outcome, PendingForecast | None, float], None],
        on_judged: Callable[[str, JudgedForecast], None],
        encoder: str,
        writer: str,
    ):
        self.pending = pending
        self.scorecard = Scorecard()
        self.judged = 0
        self._forecaster = forecaster
        self._on_end = on_end
        self._on_judged = on_judged
        self._encoder = encoder
        self._writer = writer

    def settle(
        self, outcomes: Sequence[Outcome], finished_at_s: float, put: Callable[[Row], None]
    ) -> list[Decision]:
        """Passes a row for each outcome to `put`. Returns where the model was set aside or
        reinstated."""
        excess: dict[Application, list[float]] = {}
        for outcome in outcomes:
            pending = self.pending.pop(outcome.request_id)
            if pending and is_learnable(outcome):
                self._judge(outcome, pending, excess)
            put(encode(outcome, pending, self._encoder, self._writer, finished_at_s))
            self._on_end(outcome, pending, finished_at_s)
        changes = (self._forecaster.compare(*each) for each in excess.items())
        return [change for change in changes if change]

    def late_row(self, ended: EndedRequest, packed: bytes) -> Row:
        """Returns the second row of an outcome: its prompt was read after the request ended."""
        pending = replace(ended.pending, packed=packed, prompt=None)
        return encode(
            ended.outcome, pending, self._encoder, self._writer, ended.finished_at_s, READ_LATE
        )

    def _judge(
        self,
        outcome: Outcome,
        pending: PendingForecast,
        excess: dict[Application, list[float]],
    ) -> None:
        """Adds the model's loss minus history's to `excess`, if a model made a forecast."""
        pair, tokens, most = pending.pair, outcome.output_tokens, outcome.max_tokens
        self.judged += 1
        judged = judge(pair.given, tokens, most)
        self.scorecard.add([judged])
        self._on_judged(pair.given.source, judged)
        if pair.by_model:
            loss = excess_loss(pair.by_model, pair.by_history, tokens, most)
            excess.setdefault((outcome.model, outcome.application), []).append(loss)

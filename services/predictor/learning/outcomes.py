"""What came true beside what was foretold: judged, and handed to the log."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from services.core import Outcome
from services.lengths import LEARNABLE_REASONS
from services.predictor.blend.guard import Foreteller
from services.predictor.learning.records import READ_LATE, encode
from services.predictor.learning.scorecard import Judged, Scorecard, judge
from services.predictor.serving.forecaster import Late
from services.predictor.serving.pending import Pending, Waiting
from services.runtime.outcomelog import Row


class Outcomes:
    """Judges forecasts by their outcomes, and makes the log's rows of both. `ended` is told of each
    outcome and of what waited for it, `told` of each that was foretold: the forecast's source, and
    how good it was."""

    def __init__(
        self,
        foreteller: Foreteller,
        pending: Pending,
        ended: Callable[[Outcome, Waiting | None, float], None],
        told: Callable[[str, Judged], None],
        encoder: str,
        writer: str,
    ):
        self.pending = pending
        self.scorecard = Scorecard()
        self.judged = 0
        self._foreteller = foreteller
        self._ended = ended
        self._told = told
        self._encoder = encoder
        self._writer = writer

    def settle(
        self, outcomes: Sequence[Outcome], finished_at_s: float, put: Callable[[Row], None]
    ) -> bool:
        """Puts a row for each; whether the model was set aside or taken back by this."""
        excess: list[float] = []
        for outcome in outcomes:
            waiting = self.pending.pop(outcome.request_id)
            if waiting and outcome.reason in LEARNABLE_REASONS and outcome.output_tokens:
                excess += self._judge(outcome, waiting)
            put(encode(outcome, waiting, self._encoder, self._writer, finished_at_s))
            self._ended(outcome, waiting, finished_at_s)
        return bool(excess) and self._foreteller.compare(excess)

    def late(self, late: Late, packed: bytes) -> Row:
        """The row of what was learnt from before, now that its prompt is read."""
        waiting = replace(late.waiting, packed=packed, prompt=None)
        return encode(
            late.outcome, waiting, self._encoder, self._writer, late.finished_at_s, READ_LATE
        )

    def _judge(self, outcome: Outcome, waiting: Waiting) -> list[float]:
        """The model's loss less history's, where a model foretold."""
        made, tokens, most = waiting.made, outcome.output_tokens, outcome.max_tokens
        self.judged += 1
        judged = judge(made.given, tokens, most)
        self.scorecard.add([judged])
        self._told(made.given.source, judged)
        if made.by_model is None:
            return []
        model, history = (judge(f, tokens, most) for f in (made.by_model, made.by_history))
        return [model.pinball_tokens - history.pinball_tokens]

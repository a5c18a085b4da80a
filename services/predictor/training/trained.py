"""A ranker trained beforehand, in service: its order is kept, its lengths follow the outcomes."""

from dataclasses import dataclass

from services.predictor.blend.members import FittedMember
from services.predictor.models.fitting import Fitted, Rows, Tick, by_parts
from services.predictor.models.frame import Frame
from services.predictor.models.nets.crossfit import Ensemble
from services.predictor.models.nets.recipes import Scored
from services.predictor.models.scale import Scale
from services.predictor.models.spread import Floats


@dataclass(frozen=True)
class Rescaling:
    """A fit that keeps trained nets and learns which lengths their scores stand for here: score
    → rank → lengths of recent requests (papers/002). Can be pickled."""

    ensemble: Ensemble

    def __call__(self, frame: Frame, lengths: Floats, seed: int, tick: Tick) -> Fitted:
        scores = self.ensemble.scores(frame)[:, 0]

        def fit(rows: Rows) -> Scale:
            return Scale.fit(scores[rows], lengths[rows])

        def say(scale: Scale, rows: Rows) -> Floats:
            return scale.spread(scores[rows])

        _, unseen = by_parts(frame, seed, tick, fit, say)
        return Fitted(Scored(self.ensemble, Scale.fit(scores, lengths)), unseen)


def trained_member(model: Scored) -> FittedMember:
    """Ready at once; a refit changes its scale only."""
    member = FittedMember(Rescaling(model.ensemble))
    member.adopt(model)
    return member

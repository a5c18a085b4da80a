"""Starting from a ranker that was trained beforehand: its order is kept, its lengths follow the
outcomes."""

import logging
from dataclasses import dataclass
from pathlib import Path

from services.predictor.artefact.folder import MEMBER, check_installed, load_or_set_aside
from services.predictor.artefact.manifest import ArtefactError
from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.members import FittedMember
from services.predictor.encoder.source import find_folder
from services.predictor.interface import Options
from services.predictor.models.fitting import Fitted, Rows, Tick, by_parts
from services.predictor.models.frame import Frame
from services.predictor.models.nets.crossfit import Ensemble
from services.predictor.models.nets.recipes import Scored
from services.predictor.models.scale import Scale
from services.predictor.models.spread import Floats
from services.predictor.predictors import build_reading

log = logging.getLogger(__name__)


def build_pretrained(
    name: str, options: Options, folder: str
) -> tuple[ContentPredictor, str] | None:
    """The predictor with its ranker out of the artefact, and the encoder it reads with.

    None, with a warning, where the artefact cannot be used: it was moved aside, and serving goes on
    without. Raises ValueError for a predictor without a ranker.
    """
    artefact = load_or_set_aside(Path(folder))
    if artefact is None:
        return None
    try:
        check_installed(artefact, find_folder(artefact.encoder))
    except ArtefactError as error:
        log.warning("serving goes on without a trained ranker: %s", error)
        return None
    predictor = build_reading(name, options, {MEMBER: trained_member(artefact.model)})
    predictor.adopt(artefact.refitted())
    return predictor, artefact.encoder


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

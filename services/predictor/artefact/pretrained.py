"""Predictors that start from a trained ranker: the order is kept, lengths adapt to outcomes."""

import logging
from dataclasses import dataclass
from pathlib import Path

from services.encoder.source import find_folder
from services.predictor.artefact.folder import MEMBER, check_installed, load_or_set_aside
from services.predictor.artefact.manifest import ArtefactError
from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.members import FittedMember
from services.predictor.interface import Options
from services.predictor.models.fitting import Fitted, ProgressCallback, Rows, cross_fit
from services.predictor.models.frame import Frame
from services.predictor.models.nets.crossfit import Ensemble
from services.predictor.models.nets.recipes import ScoreModel
from services.predictor.models.scale import Scale
from services.predictor.models.spread import Floats
from services.predictor.predictors import build_reading

log = logging.getLogger(__name__)


def build_pretrained(
    name: str, options: Options, folder: str
) -> tuple[ContentPredictor, str] | None:
    """Returns the predictor with the artefact's ranker and the name of its encoder.

    Returns None with a warning when the artefact cannot be used. Raises ValueError for a predictor
    without a ranker.
    """
    artefact = load_or_set_aside(Path(folder))
    if artefact is None:
        return None
    try:
        check_installed(artefact, find_folder(artefact.encoder))
    except ArtefactError as error:
        log.warning("serving continues without a trained ranker: %s", error)
        return None
    predictor = build_reading(name, options, {MEMBER: trained_member(artefact.model)})
    predictor.adopt(artefact.refitted())
    return predictor, artefact.encoder


@dataclass(frozen=True)
class Rescaling:
    """A fit that keeps the trained nets and relearns the lengths of their scores: score → rank →
    lengths of recent requests (Learning to Rank, Fu et al., NeurIPS 2024). Picklable."""

    ensemble: Ensemble

    def __call__(self, frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
        scores = self.ensemble.scores(frame)[:, 0]

        def fit(rows: Rows) -> Scale:
            return Scale.fit(scores[rows], lengths[rows])

        def predict(scale: Scale, rows: Rows) -> Floats:
            return scale.spread(scores[rows])

        _, out_of_fold = cross_fit(frame, seed, tick, fit, predict)
        return Fitted(ScoreModel(self.ensemble, Scale.fit(scores, lengths)), out_of_fold)


def trained_member(model: ScoreModel) -> FittedMember:
    """A member that is ready at once; a refit changes only its scale."""
    member = FittedMember(Rescaling(model.ensemble))
    member.adopt(model)
    return member

"""Starting from a ranker that was trained beforehand."""

import logging
from pathlib import Path

from services.predictor.blend.content import ContentPredictor
from services.predictor.interface import Options
from services.predictor.predictors import build_reading

log = logging.getLogger(__name__)


def build_pretrained(
    name: str, options: Options, folder: str
) -> tuple[ContentPredictor, str] | None:
    """The predictor with its ranker out of the artefact, and the encoder it reads with.

    None, with a warning, where the artefact cannot be used: it was moved aside, and serving goes on
    without. Raises ValueError for a predictor without a ranker.
    """
    from services.predictor.encoder.source import find_folder
    from services.predictor.training.artefact import MEMBER, check_installed, load_or_set_aside
    from services.predictor.training.manifest import ArtefactError
    from services.predictor.training.trained import trained_member

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

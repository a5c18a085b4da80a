"""The manifest of an artefact: training data, encoder and accuracy."""

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from services.predictor.interface import LAYERS, NUMBERS, WORD_COLUMNS

FILE = "manifest.json"
FORMAT: Literal["foretoken-ranker"] = "foretoken-ranker"
VERSION: Literal[1] = 1
INSIDE = "encoder/"  # the encoder inside the artefact
FEATURES = f"{LAYERS} layers, {WORD_COLUMNS} words, {' '.join(NUMBERS)}"  # inputs of the nets


class ArtefactError(ValueError):
    """An artefact cannot be used; the message says why and what to do.

    `aside` is the suffix of the renamed folder.
    """

    aside = "corrupt"


class FutureArtefactError(ArtefactError):
    """Written by a newer foretoken."""

    aside = "future"


class OldArtefactError(ArtefactError):
    """Intact, but trained on features that foretoken no longer reads."""

    aside = "old"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrainedOn(_Part):
    """Name of a data set and number of its rows used for training."""

    data: str
    rows: int


class Metrics(_Part):
    """Accuracy on the validation rows, which are not trained on; null when there are too few.

    tau_held: on the held-out prompts that stopped the training, so slightly optimistic.
    """

    n: int
    tau: float | None = None
    tau_by_data: dict[str, float | None] = {}
    tau_held: float | None = None
    pinball: float | None = None
    coverage_50: float | None = None
    coverage_90: float | None = None


class Manifest(_Part):
    """Version 1. Digests are SHA-256 in hex; `encoder` is a name, a folder or INSIDE."""

    format: Literal["foretoken-ranker"] = FORMAT
    version: Literal[1] = VERSION
    created: str  # ISO 8601, UTC
    foretoken: str
    encoder: str
    encoder_sha256: str
    features: str  # FEATURES at training time
    fine_tuned: bool
    seed: int
    trained_on: tuple[TrainedOn, ...]
    metrics: Metrics
    ranker_sha256: str = ""  # set by `write`


def read_manifest(folder: Path) -> Manifest:
    """Raises ArtefactError or one of its subclasses."""
    advice = f"retrain it: foretoken train ranker --data FILE --out {folder}"
    if not folder.is_dir():
        raise ArtefactError(f"there is no ranker artefact {folder}; {advice}")
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtefactError(
            f"{folder} is not a ranker artefact: it has no {FILE}; {advice}"
        ) from None
    except (OSError, ValueError) as error:
        raise ArtefactError(f"{folder / FILE} cannot be read: {error}; {advice}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ArtefactError(f"{folder / FILE} does not have the format {FORMAT!r}; {advice}")
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise FutureArtefactError(
            f"{folder} has version {version}, and this foretoken reads up to {VERSION}: "
            f"upgrade foretoken, or {advice}"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "manifest"
        raise ArtefactError(
            f"{folder / FILE} is broken: {where}: {first['msg']}; {advice}"
        ) from None
    if manifest.features != FEATURES:
        raise OldArtefactError(
            f"{folder} was trained on features that this foretoken does not read; {advice}"
        )
    return manifest


def digest(*files: Path) -> str:
    """SHA-256 of the concatenated files."""
    sha = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(2**20):
                sha.update(block)
    return sha.hexdigest()


def weights_digest(encoder: Path) -> str:
    """Digest of an encoder folder's weights and tokenizer, which determine its vectors."""
    kinds = ("*.safetensors", "pytorch_model*.bin", "tokenizer.json")
    return digest(*sorted({path for kind in kinds for path in encoder.glob(kind)}))

"""What an artefact says of itself: who trained it, on what, and how well it did."""

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from services.predictor.interface import LAYERS, NUMBERS, WORD_COLUMNS

FILE = "manifest.json"
FORMAT: Literal["foretoken-ranker"] = "foretoken-ranker"
VERSION: Literal[1] = 1
INSIDE = "encoder/"  # the encoder that the artefact itself holds
FEATURES = f"{LAYERS} layers, {WORD_COLUMNS} words, {' '.join(NUMBERS)}"  # what nets read


class ArtefactError(ValueError):
    """An artefact that cannot be used; the sentence says why, and what to do.

    `aside` is how one moved out of the way is named.
    """

    aside = "corrupt"


class FutureArtefactError(ArtefactError):
    """Written by a newer foretoken."""

    aside = "future"


class OldArtefactError(ArtefactError):
    """Whole, but trained on what foretoken no longer reads of a prompt."""

    aside = "old"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrainedOn(_Part):
    """A data set by name, and how many of its rows trained."""

    data: str
    rows: int


class Metrics(_Part):
    """Of the project's validation rows, which trained nothing; null where there were too few.

    tau_held: on the held-out prompts that chose when training ended, so a little too high.
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
    features: str  # FEATURES when it was trained
    fine_tuned: bool
    seed: int
    trained_on: tuple[TrainedOn, ...]
    metrics: Metrics
    ranker_sha256: str = ""  # filled in when saved


def read_manifest(folder: Path) -> Manifest:
    """Raises ArtefactError, and the kind of it that it is."""
    advice = f"train it anew: foretoken train ranker --data FILE --out {folder}"
    if not folder.is_dir():
        raise ArtefactError(f"there is no ranker artefact {folder}; {advice}")
    try:
        said = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtefactError(f"{folder} is no ranker artefact: it has no {FILE}; {advice}") from None
    except (OSError, ValueError) as error:
        raise ArtefactError(f"{folder / FILE} cannot be read: {error}; {advice}") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise ArtefactError(f"{folder / FILE} does not say {FORMAT!r}; {advice}")
    version = said.get("version")
    if isinstance(version, int) and version > VERSION:
        raise FutureArtefactError(
            f"{folder} has version {version}, and this foretoken reads up to {VERSION}: "
            f"upgrade foretoken, or {advice}"
        )
    try:
        manifest = Manifest.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ArtefactError(
            f"{folder / FILE} is broken: {where}: {first['msg']}; {advice}"
        ) from None
    if manifest.features != FEATURES:
        raise OldArtefactError(
            f"{folder} was trained on other features than are read now; {advice}"
        )
    return manifest


def digest(*files: Path) -> str:
    """SHA-256 over the files' contents, end to end."""
    sha = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(2**20):
                sha.update(block)
    return sha.hexdigest()


def weights_digest(encoder: Path) -> str:
    """Of an encoder folder's weights and tokenizer: what its vectors follow from."""
    kinds = ("*.safetensors", "pytorch_model*.bin", "tokenizer.json")
    return digest(*sorted({path for kind in kinds for path in encoder.glob(kind)}))

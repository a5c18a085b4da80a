"""Ranker artefacts: folders with manifest.json, ranker.safetensors, and encoder/ if fine-tuned."""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from services.predictor.artefact.manifest import (
    FILE,
    INSIDE,
    ArtefactError,
    Manifest,
    digest,
    read_manifest,
    weights_digest,
)
from services.predictor.artefact.tensors import (
    Calibration,
    Tensors,
    calibration_from_tensors,
    calibration_to_tensors,
    from_tensors,
    to_tensors,
)
from services.predictor.blend.content import Refitted
from services.predictor.models.fitting import Fitted
from services.predictor.models.nets.recipes import ScoreModel

log = logging.getLogger(__name__)

MEMBER = "ranker"
_RANKER = "ranker.safetensors"
_MAX_ASIDE_NAMES = 1_000  # attempts to find a free name


@dataclass(frozen=True)
class Artefact:
    """A ranker ready to forecast and the encoder of the features that it reads.

    encoder: argument of `Encoder.load`.
    """

    model: ScoreModel
    encoder: str
    manifest: Manifest
    calibration: Calibration

    def refitted(self, member: str = MEMBER) -> Refitted:
        """Returns the trained state that a content predictor adopts before the first outcome: the
        model and its out-of-fold forecasts."""
        calibration = self.calibration
        fitted = {member: Fitted(self.model, calibration.spread)}
        return Refitted.weigh(fitted, calibration.applications, calibration.lengths)


def load(path: Path) -> Artefact:
    """Loads an artefact without running any code in it. Raises ArtefactError with the fault and the
    remedy."""
    folder = Path(path)
    manifest = read_manifest(folder)
    _check_encoder(folder, manifest)
    tensors, described = _read(folder, manifest)
    try:
        model = from_tensors(tensors, described["model"])
        calibration = calibration_from_tensors(tensors, described["calibration"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise _broken(folder, f"its {_RANKER} holds a different model: {error}") from None
    inside = manifest.encoder == INSIDE
    encoder = str((folder / INSIDE).resolve()) if inside else manifest.encoder
    return Artefact(model, encoder, manifest, calibration)


def check_installed(artefact: Artefact, encoder: Path) -> None:
    """Raises ArtefactError when the encoder differs from the one the ranker was trained on."""
    if weights_digest(encoder) != artefact.manifest.encoder_sha256:
        raise ArtefactError(
            f"the ranker was trained on a different version of the encoder {artefact.encoder!r}: "
            "install that version, or retrain the ranker with foretoken train ranker"
        )


def load_or_set_aside(path: Path) -> Artefact | None:
    """Returns the artefact, or logs a warning and returns None when it cannot be used.

    A broken artefact is renamed to `<path>.corrupt-<n>`, one of another foretoken version to
    `.future-<n>` or `.old-<n>`. A folder that is not an artefact stays in place.
    """
    folder = Path(path)
    try:
        return load(folder)
    except ArtefactError as error:
        _set_aside(folder, error)
    return None


def check_out(out: Path) -> None:
    """Raises ArtefactError unless an artefact can be written there: the folder must be missing,
    empty or an artefact."""
    if not out.resolve().parent.is_dir():
        raise ArtefactError(
            f"cannot write --out {out}: there is no folder {out.resolve().parent}; create it"
        )
    if out.exists() and not (_is_artefact(out) or _is_empty(out)):
        raise ArtefactError(
            f"--out {out} exists and is not a ranker artefact, so it is not replaced: "
            "give another folder"
        )


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yields a temporary folder next to `out`, which replaces `out` when the block succeeds.

    Raises ArtefactError when the folder cannot be written.
    """
    out = out.resolve()
    try:
        stage = Path(tempfile.mkdtemp(prefix=f".{out.name}.part-", dir=out.parent))
        stage.chmod(0o755)  # mkdtemp creates a private folder
    except OSError as error:
        raise ArtefactError(f"cannot write {out}: {error}") from None
    try:
        yield stage
        _replace(out, stage)
    except (OSError, SafetensorError) as error:  # for example, the disk is full
        raise ArtefactError(f"cannot write {out}: {error}") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write(folder: Path, model: ScoreModel, calibration: Calibration, manifest: Manifest) -> None:
    """Writes the ranker and its manifest into a staged folder."""
    tensors, of_model = to_tensors(model)
    out_of_fold, of_calibration = calibration_to_tensors(calibration)
    path = folder / _RANKER
    # save_file would make a file that other users cannot read.
    path.write_bytes(
        save(tensors | out_of_fold, {"model": of_model, "calibration": of_calibration})
    )
    complete = manifest.model_copy(update={"ranker_sha256": digest(path)})
    (folder / FILE).write_text(complete.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _read(folder: Path, manifest: Manifest) -> tuple[Tensors, dict[str, str]]:
    path = folder / _RANKER
    if not path.is_file():
        raise _broken(folder, f"it has no {_RANKER}")
    try:
        if digest(path) != manifest.ranker_sha256:
            raise _broken(folder, f"its {_RANKER} is truncated or was changed after training")
        with safe_open(path, "pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            described = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise _broken(folder, f"its {_RANKER} cannot be read: {error}") from None
    if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
        raise _broken(folder, "it has values that are not finite")
    return tensors, described


def _check_encoder(folder: Path, manifest: Manifest) -> None:
    if manifest.encoder != INSIDE:
        return
    if not (folder / INSIDE).is_dir():
        raise _broken(folder, f"it has no {INSIDE}")
    if weights_digest(folder / INSIDE) != manifest.encoder_sha256:
        raise _broken(folder, f"its {INSIDE} is truncated or was changed after training")


def _broken(folder: Path, why: str) -> ArtefactError:
    return ArtefactError(
        f"the ranker artefact {folder} is broken: {why}; "
        f"retrain it: foretoken train ranker --data FILE --out {folder}"
    )


def _set_aside(folder: Path, error: ArtefactError) -> None:
    if not _is_artefact(folder):
        log.warning("serving continues without a trained ranker: %s", error)
        return
    names = (
        folder.with_name(f"{folder.name}.{error.aside}-{n}") for n in range(1, _MAX_ASIDE_NAMES)
    )
    try:
        aside = next(name for name in names if not name.exists())
        folder.rename(aside)
    except (OSError, StopIteration) as failure:
        log.warning("%s cannot be renamed (%s) and is ignored: %s", folder, failure, error)
        return
    log.warning(
        "%s was renamed to %s; serving continues without a trained ranker: %s", folder, aside, error
    )


def _replace(out: Path, stage: Path) -> None:
    """Moves the staged folder to `out`; an existing artefact is deleted after the new one is in
    place."""
    check_out(out)
    if not _is_artefact(out):
        stage.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
    out.rename(old)
    try:
        stage.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _is_artefact(folder: Path) -> bool:
    """Returns whether the folder has a file of an artefact, intact or broken."""
    return (folder / _RANKER).is_file() or (folder / FILE).is_file()


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())

"""A trained ranker in a folder: manifest.json, ranker.safetensors, and encoder/ if fine-tuned."""

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
from services.predictor.models.nets.recipes import Scored

log = logging.getLogger(__name__)

MEMBER = "ranker"
_RANKER = "ranker.safetensors"
_ASIDE_MOST = 1_000  # tries for a free name


@dataclass(frozen=True)
class Artefact:
    """A ranker ready to forecast, and the encoder whose features it reads.

    encoder: what `Encoder.load` takes.
    """

    model: Scored
    encoder: str
    manifest: Manifest
    calibration: Calibration

    def refitted(self, member: str = MEMBER) -> Refitted:
        """What a content predictor adopts before any outcome, as if that member had just been
        fitted: the model, and what it said of training requests unseen."""
        own = self.calibration
        fitted = {member: Fitted(self.model, own.spread)}
        return Refitted.weigh(fitted, own.applications, own.lengths)


def load(path: Path) -> Artefact:
    """Raises ArtefactError with what is wrong and what to do; nothing in the folder is run."""
    folder = Path(path)
    manifest = read_manifest(folder)
    _check_encoder(folder, manifest)
    tensors, described = _read(folder, manifest)
    try:
        model = from_tensors(tensors, described["model"])
        calibration = calibration_from_tensors(tensors, described["calibration"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise _broken(folder, f"its {_RANKER} holds another model: {error}") from None
    inside = manifest.encoder == INSIDE
    encoder = str((folder / INSIDE).resolve()) if inside else manifest.encoder
    return Artefact(model, encoder, manifest, calibration)


def check_installed(artefact: Artefact, encoder: Path) -> None:
    """Raises ArtefactError where the folder's encoder isn't the one the ranker was trained on."""
    if weights_digest(encoder) != artefact.manifest.encoder_sha256:
        raise ArtefactError(
            f"the ranker was trained on another version of the encoder {artefact.encoder!r}: "
            "install that one, or train the ranker anew with foretoken train ranker"
        )


def load_or_set_aside(path: Path) -> Artefact | None:
    """The artefact, or None and a warning where there is none to use; serving goes on without.

    A broken one is renamed to `<path>.corrupt-<n>`, one of another foretoken to `.future-<n>` or
    `.old-<n>`; a folder that was never an artefact stays where it is.
    """
    folder = Path(path)
    try:
        return load(folder)
    except ArtefactError as error:
        _set_aside(folder, error)
    return None


def check_out(out: Path) -> None:
    """Raises ArtefactError unless an artefact can be written there: in a folder's place only if
    it is one itself, or empty."""
    if not out.resolve().parent.is_dir():
        raise ArtefactError(f"cannot write {out}: there is no folder {out.resolve().parent}")
    if out.exists() and not (_is_artefact(out) or _is_empty(out)):
        raise ArtefactError(
            f"{out} exists and is no ranker artefact: it is left as it is; give another --out"
        )


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into; it takes its place, whole, when all went well.

    Raises ArtefactError where nothing can be written.
    """
    out = out.resolve()
    try:
        stage = Path(tempfile.mkdtemp(prefix=f".{out.name}.part-", dir=out.parent))
        stage.chmod(0o755)  # as other folders are; mkdtemp's is private
    except OSError as error:
        raise ArtefactError(f"cannot write {out}: {error}") from None
    try:
        yield stage
        _replace(out, stage)
    except (OSError, SafetensorError) as error:  # the disk is full, or gone
        raise ArtefactError(f"cannot write {out}: {error}") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write(folder: Path, model: Scored, calibration: Calibration, manifest: Manifest) -> None:
    """The ranker and its manifest into a staged folder."""
    tensors, of_model = to_tensors(model)
    unseen, of_calibration = calibration_to_tensors(calibration)
    path = folder / _RANKER
    # Not save_file, whose files no other user may read.
    path.write_bytes(save(tensors | unseen, {"model": of_model, "calibration": of_calibration}))
    whole = manifest.model_copy(update={"ranker_sha256": digest(path)})
    (folder / FILE).write_text(whole.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _read(folder: Path, manifest: Manifest) -> tuple[Tensors, dict[str, str]]:
    path = folder / _RANKER
    if not path.is_file():
        raise _broken(folder, f"it has no {_RANKER}")
    try:
        if digest(path) != manifest.ranker_sha256:
            raise _broken(folder, f"its {_RANKER} is cut short or was changed after training")
        with safe_open(path, "pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            described = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise _broken(folder, f"its {_RANKER} cannot be read: {error}") from None
    if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
        raise _broken(folder, "it holds numbers that are not finite")
    return tensors, described


def _check_encoder(folder: Path, manifest: Manifest) -> None:
    if manifest.encoder != INSIDE:
        return
    if not (folder / INSIDE).is_dir():
        raise _broken(folder, f"it has no {INSIDE}")
    if weights_digest(folder / INSIDE) != manifest.encoder_sha256:
        raise _broken(folder, f"its {INSIDE} is cut short or was changed after training")


def _broken(folder: Path, why: str) -> ArtefactError:
    return ArtefactError(
        f"the ranker artefact {folder} is broken: {why}; "
        f"train it anew: foretoken train ranker --data FILE --out {folder}"
    )


def _set_aside(folder: Path, error: ArtefactError) -> None:
    if not _is_artefact(folder):
        log.warning("serving goes on without a trained ranker: %s", error)
        return
    names = (folder.with_name(f"{folder.name}.{error.aside}-{n}") for n in range(1, _ASIDE_MOST))
    try:
        aside = next(name for name in names if not name.exists())
        folder.rename(aside)
    except (OSError, StopIteration) as failure:
        log.warning("%s cannot be moved aside (%s); left unused: %s", folder, failure, error)
        return
    log.warning("%s was moved aside to %s, and serving goes on without: %s", folder, aside, error)


def _replace(out: Path, stage: Path) -> None:
    """Puts the stage where `out` is; an artefact already there goes when the new one stands."""
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
    """It is one, or was before it broke."""
    return (folder / _RANKER).is_file() or (folder / FILE).is_file()


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())

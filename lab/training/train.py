"""A whole training: from names of files to an artefact."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from math import isfinite
from pathlib import Path

import numpy as np
import torch

from lab.data.examples import Known
from lab.evaluation.scores import score
from lab.training import ranker
from lab.training.datasets import (
    Divided,
    Lessons,
    divide,
    lessons_of,
    read_all,
    read_features,
)
from lab.training.early_stopping import Course, Report
from lab.training.tune_encoder import tune_encoder
from services.predictor.artefact.folder import Artefact, check_out, load, staged, write
from services.predictor.artefact.manifest import (
    FEATURES,
    INSIDE,
    ArtefactError,
    Manifest,
    Metrics,
    TrainedOn,
    weights_digest,
)
from services.predictor.encoder.encoder import Encoder
from services.predictor.encoder.extract import Extractor
from services.predictor.encoder.source import DEFAULT_NAME, find_folder
from services.predictor.models.nets.recipes import Scored
from services.predictor.models.scoring import tau_b
from services.predictor.models.spread import Floats, forecasts, mean


@dataclass(frozen=True)
class Training:
    """What to train a ranker on, and how; `threads` of PyTorch. Where the encoder is fine-tuned,
    the course's epochs are its own, and the ranker on top takes as many as usual."""

    data: Sequence[str]
    out: Path
    course: Course
    encoder: str = DEFAULT_NAME
    fine_tune: bool = False
    threads: int = 1


def train_ranker(what: Training, report: Report) -> Artefact:
    """Trains, saves, and loads what was saved. Raises ValueError for a mistake of the user's;
    whatever ends it early leaves `what.out` as it was."""
    _check(what)
    torch.set_num_threads(what.threads)
    parts = divide(read_all(what.data), what.course.seed, 2 if what.fine_tune else 1)
    encoder = Encoder.load(what.encoder, threads=what.threads)
    with staged(what.out) as folder:
        if what.fine_tune:
            inside = folder / INSIDE
            tune_encoder(what.encoder, encoder, parts, inside, what.course, report)
            encoder = Encoder.load(str(inside), threads=what.threads)
        known = read_features(parts, Extractor(encoder), report.tell)
        model, calibration = _trained(what, parts, known, report)
        manifest = _manifest(what, folder, parts, _metrics(model, parts, known))
        write(folder, model, calibration, manifest)
    return load(what.out)


def _check(what: Training) -> None:
    check_out(what.out)
    inside = Path(what.encoder).resolve().is_relative_to(what.out.resolve())
    if inside and not what.fine_tune:
        raise ArtefactError(
            f"the encoder {what.encoder} lies in {what.out}, which would be replaced: "
            "give another --out"
        )


def _trained(what: Training, parts: Divided, known: Known, report: Report) -> ranker.Trained:
    train_on, held = lessons_of(parts.train, known), lessons_of(parts.held, known)
    assert train_on, "divide leaves rows to train on"
    if not what.fine_tune:
        return ranker.fit(train_on, held, what.course, report)
    trained = ranker.fit(train_on, held, replace(what.course, epochs=0), report)
    return ranker.calibrate_anew(trained[0], held) if held else trained


def _manifest(what: Training, folder: Path, parts: Divided, metrics: Metrics) -> Manifest:
    inside = folder / INSIDE
    source = inside if what.fine_tune else find_folder(what.encoder)
    return Manifest(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        foretoken=version("foretoken"),
        encoder=INSIDE if what.fine_tune else _lasting(what.encoder),
        encoder_sha256=weights_digest(source),
        features=FEATURES,
        fine_tuned=what.fine_tune,
        seed=what.course.seed,
        trained_on=tuple(
            TrainedOn(data=name, rows=rows)
            for name, rows in sorted(Counter(row.data for row in parts.train).items())
        ),
        metrics=metrics,
    )


def _lasting(encoder: str) -> str:
    """A folder by its whole path, so that the artefact can be loaded from anywhere."""
    own = encoder != DEFAULT_NAME and Path(encoder).is_dir()
    return str(Path(encoder).resolve()) if own else encoder


def _metrics(model: Scored, parts: Divided, known: Known) -> Metrics:
    held, judged = (lessons_of(rows, known) for rows in (parts.held, parts.judged))
    tau_held = _tau(mean(model.spread(held.frame)), held.lengths) if held else None
    if judged is None:
        return Metrics(n=0, tau_held=tau_held)
    return _judged(model, judged, np.array([row.data for row in parts.judged]), tau_held)


def _judged(model: Scored, on: Lessons, data: np.ndarray, tau_held: float | None) -> Metrics:
    spread = model.spread(on.frame)
    scores = score(forecasts(spread, "ranker", 0), [int(n) for n in on.lengths])
    means = mean(spread)
    return Metrics(
        n=scores.n,
        tau=_tau(means, on.lengths),
        tau_by_data={
            str(name): _tau(means[data == name], on.lengths[data == name])
            for name in np.unique(data)
        },
        tau_held=tau_held,
        pinball=_said(scores.pinball),
        coverage_50=scores.coverage_50,
        coverage_90=scores.coverage_90,
    )


def _tau(forecast: Floats, true: Floats) -> float | None:
    return _said(tau_b(forecast, true))


def _said(value: float) -> float | None:
    """JSON has no NaN."""
    return value if isfinite(value) else None

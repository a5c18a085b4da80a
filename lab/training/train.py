"""Runs a complete training: from names of files to an artefact."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from math import isfinite
from pathlib import Path

import numpy as np
import torch

from lab.data.examples import FeaturesByPrompt
from lab.evaluation.scores import score
from lab.training import ranker
from lab.training.datasets import (
    RowSplit,
    divide,
    read_all,
    read_features,
    training_set,
)
from lab.training.early_stopping import TrainingOptions, TrainingReporter
from lab.training.tune_encoder import tune_encoder
from services.encoder.encoder import Encoder
from services.encoder.source import DEFAULT_NAME, find_folder
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
from services.predictor.encoder.extract import Extractor
from services.predictor.learning.scorecard import tau_b
from services.predictor.models.nets.recipes import ScoreModel
from services.predictor.models.spread import Floats, forecasts, mean


@dataclass(frozen=True)
class Training:
    """Settings of `train_ranker`. `threads` are PyTorch's. With `fine_tune`, `options.epochs`
    applies to the encoder, and the ranker uses its default."""

    data: Sequence[str]
    out: Path
    options: TrainingOptions
    encoder: str = DEFAULT_NAME
    fine_tune: bool = False
    threads: int = 1


def train_ranker(training: Training, report: TrainingReporter) -> Artefact:
    """Trains, writes and loads the artefact. Raises ValueError for invalid input; on failure
    `training.out` is unchanged."""
    _check(training)
    torch.set_num_threads(training.threads)
    parts = divide(read_all(training.data), training.options.seed, 2 if training.fine_tune else 1)
    encoder = Encoder.load(training.encoder, threads=training.threads)
    with staged(training.out) as folder:
        if training.fine_tune:
            inside = folder / INSIDE
            tune_encoder(training.encoder, encoder, parts, inside, training.options, report)
            encoder = Encoder.load(str(inside), threads=training.threads)
        known = read_features(parts, Extractor(encoder), report.progress)
        model, calibration = _fit(training, parts, known, report)
        manifest = _manifest(training, folder, parts, _metrics(model, parts, known))
        write(folder, model, calibration, manifest)
    return load(training.out)


def _check(training: Training) -> None:
    check_out(training.out)
    inside = Path(training.encoder).resolve().is_relative_to(training.out.resolve())
    if inside and not training.fine_tune:
        raise ArtefactError(
            f"the encoder {training.encoder} lies in {training.out}, which would be replaced: "
            "give another --out"
        )


def _fit(
    training: Training, parts: RowSplit, known: FeaturesByPrompt, report: TrainingReporter
) -> ranker.Trained:
    train_on, held = training_set(parts.train, known), training_set(parts.held, known)
    assert train_on, "divide() returned no training rows"
    if not training.fine_tune:
        return ranker.fit(train_on, held, training.options, report)
    trained = ranker.fit(train_on, held, replace(training.options, epochs=0), report)
    return ranker.recalibrate(trained[0], held) if held else trained


def _manifest(training: Training, folder: Path, parts: RowSplit, metrics: Metrics) -> Manifest:
    inside = folder / INSIDE
    source = inside if training.fine_tune else find_folder(training.encoder)
    return Manifest(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        foretoken=version("foretoken"),
        encoder=INSIDE if training.fine_tune else _absolute_if_folder(training.encoder),
        encoder_sha256=weights_digest(source),
        features=FEATURES,
        fine_tuned=training.fine_tune,
        seed=training.options.seed,
        trained_on=tuple(
            TrainedOn(data=name, rows=rows)
            for name, rows in sorted(Counter(row.data for row in parts.train).items())
        ),
        metrics=metrics,
    )


def _absolute_if_folder(encoder: str) -> str:
    """Makes a folder's path absolute, so that the artefact loads from any directory."""
    is_folder = encoder != DEFAULT_NAME and Path(encoder).is_dir()
    return str(Path(encoder).resolve()) if is_folder else encoder


def _metrics(model: ScoreModel, parts: RowSplit, known: FeaturesByPrompt) -> Metrics:
    held, judged = (training_set(rows, known) for rows in (parts.held, parts.judged))
    tau_held = _tau(mean(model.spread(held.frame)), held.lengths) if held else None
    if judged is None:
        return Metrics(n=0, tau_held=tau_held)
    data = np.array([row.data for row in parts.judged])
    spread, lengths = model.spread(judged.frame), judged.lengths
    scores = score(forecasts(spread, "ranker", 0), [int(n) for n in lengths])
    means = mean(spread)
    return Metrics(
        n=scores.n,
        tau=_tau(means, lengths),
        tau_by_data={
            str(name): _tau(means[data == name], lengths[data == name]) for name in np.unique(data)
        },
        tau_held=tau_held,
        pinball=_finite_or_none(scores.pinball),
        coverage_50=scores.coverage_50,
        coverage_90=scores.coverage_90,
    )


def _tau(forecast: Floats, true: Floats) -> float | None:
    return _finite_or_none(tau_b(forecast, true))


def _finite_or_none(value: float) -> float | None:
    """Returns None for NaN, which JSON does not support."""
    return value if isfinite(value) else None

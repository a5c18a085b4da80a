"""Splits rows into those that train a ranker, stop its training, and evaluate it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.data.examples import (
    FeaturesByPrompt,
    ReportProgress,
    examples_of,
    extract_all,
    prompt_of,
)
from lab.data.rows import DataError, Row, parse_source, read_rows
from lab.data.split import is_validation, prompt_digest
from services.predictor.encoder.extract import FeatureExtractor
from services.predictor.models.frame import Frame
from services.predictor.models.spread import Floats

MIN_ROWS = 64  # minimum training rows
_MAX_TOKENS = 4096  # for rows without a cap; rankers ignore it


@dataclass(frozen=True)
class RowSplit:
    """Rows in three parts without common prompts.

    held: stops the training, and calibrates lengths when the encoder was trained on the rows.
    judged: the project's validation rows.
    """

    train: Sequence[Row]
    held: Sequence[Row]
    judged: Sequence[Row]


@dataclass(frozen=True)
class TrainingSet:
    """Requests as model input and their true lengths [n]."""

    frame: Frame
    lengths: Floats


def read_all(data: Sequence[str]) -> list[Row]:
    """Reads the rows of all files, each file once. Raises DataError."""
    sources = dict.fromkeys(map(parse_source, data))
    return [row for source in sources for row in read_rows(source)]


def divide(rows: Sequence[Row], seed: int, tenths: int = 1) -> RowSplit:
    """Splits shuffled rows: a quarter of all prompts for evaluation, `tenths` of the rest held out.

    Raises DataError when too few rows remain to train on.
    """
    shuffled = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    parts: dict[str, list[Row]] = {"train": [], "held": [], "judged": []}
    for row in shuffled:
        parts[_part(row.prompt, tenths)].append(row)
    if len(parts["train"]) < MIN_ROWS:
        raise DataError(
            f"{len(parts['train'])} of {len(rows)} rows remain to train on, after a quarter of "
            f"the prompts was reserved for evaluation; a ranker needs {MIN_ROWS} or more"
        )
    return RowSplit(**parts)


def _part(prompt: str, tenths: int) -> str:
    if is_validation(prompt):
        return "judged"
    # Other digits than those of is_validation.
    return "held" if int(prompt_digest(prompt)[8:16], 16) % 10 < tenths else "train"


def read_features(
    parts: RowSplit, extractor: FeatureExtractor, progress: ReportProgress
) -> FeaturesByPrompt:
    """Returns features of every prompt, each read once."""
    rows = [*parts.train, *parts.held, *parts.judged]
    prompts = list({prompt_of(row) for row in rows})
    return dict(zip(prompts, extract_all(prompts, extractor, progress), strict=True))


def training_set(rows: Sequence[Row], features: FeaturesByPrompt) -> TrainingSet | None:
    """Returns None when there are no rows."""
    if not rows:
        return None
    examples = examples_of(rows, features, _MAX_TOKENS)
    lengths = np.array([float(example.output_tokens) for example in examples])
    return TrainingSet(Frame.from_queries([example.query for example in examples]), lengths)

"""Which rows train a ranker, which are held out to stop it, and which judge it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.data.examples import (
    Known,
    Tell,
    examples_of,
    extract_all,
    prompt_of,
)
from lab.data.rows import DataError, Row, parse_source, read_rows
from lab.data.split import is_validation, normalised
from services.predictor.encoder.extract import Extracts
from services.predictor.models.frame import Frame
from services.predictor.models.spread import Floats

LEAST = 64  # rows to train on; below, ranks say little
_MAX_TOKENS = 4096  # of requests whose row tells no cap; rankers don't read it


@dataclass(frozen=True)
class Divided:
    """Rows whose prompts are in no other part.

    held: chooses when training ends, and tells which lengths scores stand for where the training
    rows can't, as the encoder has learnt them. judged: the project's validation rows.
    """

    train: Sequence[Row]
    held: Sequence[Row]
    judged: Sequence[Row]


@dataclass(frozen=True)
class Lessons:
    """Requests as models read them, and their true lengths [n]."""

    frame: Frame
    lengths: Floats


def read_all(data: Sequence[str]) -> list[Row]:
    """Rows of all files, one named twice read once. Raises DataError."""
    sources = dict.fromkeys(map(parse_source, data))
    return [row for source in sources for row in read_rows(source)]


def divide(rows: Sequence[Row], seed: int, tenths: int = 1) -> Divided:
    """Judged are a quarter of all prompts, the project's; so many tenths of the rest are held out.
    Rows come in a seeded order, as outcomes reach a service mixed.

    Raises DataError when too few are left to train on.
    """
    shuffled = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    parts: dict[str, list[Row]] = {"train": [], "held": [], "judged": []}
    for row in shuffled:
        parts[_part(row.prompt, tenths)].append(row)
    if len(parts["train"]) < LEAST:
        raise DataError(
            f"{len(parts['train'])} of {len(rows)} rows are left to train on, after a quarter of "
            f"the prompts was set aside for judging; a ranker needs {LEAST} or more"
        )
    return Divided(**parts)


def _part(prompt: str, tenths: int) -> str:
    if is_validation(prompt):
        return "judged"
    digest = hashlib.sha1(normalised(prompt).encode(errors="surrogatepass")).hexdigest()
    # Other digits than the judged quarter's.
    return "held" if int(digest[8:16], 16) % 10 < tenths else "train"


def read_features(parts: Divided, extractor: Extracts, tell: Tell) -> Known:
    """Features of every prompt, each read once."""
    rows = [*parts.train, *parts.held, *parts.judged]
    prompts = list({prompt_of(row) for row in rows})
    return dict(zip(prompts, extract_all(prompts, extractor, tell), strict=True))


def lessons_of(rows: Sequence[Row], features: Known) -> Lessons | None:
    """None where there are no rows."""
    if not rows:
        return None
    examples = examples_of(rows, features, _MAX_TOKENS)
    lengths = np.array([float(example.output_tokens) for example in examples])
    return Lessons(Frame.of([example.query for example in examples]), lengths)

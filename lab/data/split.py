"""Splits rows into training and evaluation sets by the prompt's hash."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.data.rows import DataError, Row, Source


@dataclass(frozen=True)
class JudgedRows:
    """Rows of one data set to evaluate; `in_domain` when other rows of the set are trained on."""

    name: str
    in_domain: bool
    rows: Sequence[Row]


@dataclass(frozen=True)
class Split:
    """Rows to train on and data sets to evaluate."""

    train: Sequence[Row]
    judged: Sequence[JudgedRows]


def normalised(prompt: str) -> str:
    """Normalises case and surrounding whitespace."""
    return prompt.lower().strip()


def is_validation(prompt: str) -> bool:
    """Selects a quarter of all prompts, the same in every data set and run."""
    return int(prompt_digest(prompt)[:8], 16) % 4 == 1


def prompt_digest(prompt: str) -> str:
    """Returns a hash of the normalised prompt as hexadecimal digits."""
    return hashlib.sha1(normalised(prompt).encode(errors="surrogatepass")).hexdigest()


def split(
    sets: Mapping[Source, Sequence[Row]], train: Sequence[Source], data: Sequence[Source]
) -> Split:
    """Splits the data sets. A set in both lists is evaluated on its validation rows and trained on
    the rest; a set only in `data` is evaluated completely. An evaluated prompt never trains.

    Raises DataError when no rows remain to train on or to evaluate.
    """
    judged = [_judged(source, sets[source], source in train) for source in data]
    evaluated = {normalised(row.prompt) for part in judged for row in part.rows}
    rest = [
        row for source in train for row in sets[source] if normalised(row.prompt) not in evaluated
    ]
    if not rest:
        names = ", ".join(source.name for source in train)
        raise DataError(f"no rows of {names} remain to train on: all their prompts are evaluated")
    return Split(rest, judged)


def _judged(source: Source, rows: Sequence[Row], in_domain: bool) -> JudgedRows:
    kept = [row for row in rows if is_validation(row.prompt)] if in_domain else rows
    if not kept:
        raise DataError(f"no rows of {source.name} remain to evaluate: none is a validation row")
    return JudgedRows(source.name, in_domain, kept)

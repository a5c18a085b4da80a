"""Which rows train and which are judged: by the prompt's hash, never both."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.data.rows import DataError, Row, Source


@dataclass(frozen=True)
class JudgedRows:
    """A data set's rows to judge; in domain when the same set's other rows train."""

    name: str
    in_domain: bool
    rows: Sequence[Row]


@dataclass(frozen=True)
class Split:
    train: Sequence[Row]
    judged: Sequence[JudgedRows]


def normalised(prompt: str) -> str:
    """Prompts that differ only in case and outer space are the same prompt."""
    return prompt.lower().strip()


def is_validation(prompt: str) -> bool:
    """A quarter of all prompts, the same ones in every data set and run."""
    digest = hashlib.sha1(normalised(prompt).encode(errors="surrogatepass")).hexdigest()
    return int(digest[:8], 16) % 4 == 1


def split(
    sets: Mapping[Source, Sequence[Row]], train: Sequence[Source], data: Sequence[Source]
) -> Split:
    """Of a set that stands in both lists its validation rows are judged and the rest train; of
    one in `data` alone all rows are judged. A prompt judged anywhere never trains.

    Raises DataError when nothing is left to train on, or of a set to judge.
    """
    judged = [_judged(source, sets[source], source in train) for source in data]
    taken = {normalised(row.prompt) for part in judged for row in part.rows}
    rest = [row for source in train for row in sets[source] if normalised(row.prompt) not in taken]
    if not rest:
        names = ", ".join(source.name for source in train)
        raise DataError(f"no rows of {names} are left to train on: all their prompts are judged")
    return Split(rest, judged)


def _judged(source: Source, rows: Sequence[Row], in_domain: bool) -> JudgedRows:
    kept = [row for row in rows if is_validation(row.prompt)] if in_domain else rows
    if not kept:
        raise DataError(f"no rows of {source.name} are left to judge: none is a validation row")
    return JudgedRows(source.name, in_domain, kept)

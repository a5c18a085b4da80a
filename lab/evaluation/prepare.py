"""Everything that is done once, before the first predictor: read, split, extract."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from lab.data.examples import (
    Known,
    Tell,
    examples_of,
    extract_all,
    prompt_of,
)
from lab.data.feature_store import FeatureStore
from lab.data.rows import DataError, parse_source, read_rows
from lab.data.split import Split, split
from lab.evaluation.judge import JudgedSet
from services.predictor.encoder.extract import Extracts
from services.predictor.interface import Example, Features, Prompt


@dataclass(frozen=True)
class Material:
    """Rows to train on and to judge, and as finished requests; features by prompt."""

    rows: Split
    train: Sequence[Example]
    sets: Sequence[JudgedSet]
    features: Known


def read_split(train: Sequence[str], data: Sequence[str], most: int, seed: int) -> Split:
    """Read each file once and split it. Raises DataError."""
    train_sources, data_sources = ([*dict.fromkeys(map(parse_source, s))] for s in (train, data))
    sources = [*dict.fromkeys([*train_sources, *data_sources])]
    if len({source.name for source in sources}) < len(sources):
        raise DataError("two of the files have the same name; a table could not tell them apart")
    sets = {source: read_rows(source, most, seed) for source in sources}
    return split(sets, train_sources, data_sources)


def prepare(
    rows: Split,
    extractor: Extracts | None,
    store: FeatureStore | None,
    max_tokens: int,
    seed: int,
    tell: Tell,
) -> Material:
    """Features of all rows, once for all predictors; none without an extractor.

    Training rows come in a seeded order: outcomes reach a service mixed, not file by file.
    """
    known = _features(rows, extractor, store, tell) if extractor else {}
    order = np.random.default_rng(seed).permutation(len(rows.train))
    train = examples_of([rows.train[i] for i in order], known, max_tokens)
    sets = [
        JudgedSet(p.name, p.in_domain, p.rows, examples_of(p.rows, known, max_tokens))
        for p in rows.judged
    ]
    return Material(rows, train, sets, known)


def _features(rows: Split, extractor: Extracts, store: FeatureStore | None, tell: Tell) -> Known:
    def make(prompts: Sequence[Prompt]) -> list[Features]:
        return extract_all(prompts, extractor, tell)

    known: dict[Prompt, Features] = {}
    for prompts in _prompts_by_set(rows):
        known |= zip(prompts, store.get(prompts, make) if store else make(prompts), strict=True)
    return known


def _prompts_by_set(rows: Split) -> list[list[Prompt]]:
    """Each set's prompts, once and in an order of their own: the same store key for any split."""
    sets: defaultdict[str, set[Prompt]] = defaultdict(set)
    for part in [rows.train, *(judged.rows for judged in rows.judged)]:
        for row in part:
            sets[row.data].add(prompt_of(row))
    return [sorted(prompts, key=astuple) for prompts in sets.values()]


def open_store(folder: str, encoder: str) -> FeatureStore | None:
    """Raises DataError where the folder cannot be made."""
    try:
        return FeatureStore(Path(folder), encoder) if folder else None
    except OSError as error:
        raise DataError(f"the cache {folder} cannot be used: {error}") from None

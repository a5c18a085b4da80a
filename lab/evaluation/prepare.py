"""Prepares the data once for all predictors: reads, splits and extracts."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from lab.data.examples import (
    FeaturesByPrompt,
    ReportProgress,
    examples_of,
    extract_all,
    prompt_of,
)
from lab.data.feature_store import FeatureStore
from lab.data.rows import DataError, parse_source, read_rows
from lab.data.split import Split, split
from lab.evaluation.judge import JudgedSet
from services.predictor.encoder.extract import FeatureExtractor
from services.predictor.interface import Example, Features, Prompt


@dataclass(frozen=True)
class PreparedData:
    """Rows to train on and to evaluate, the matching examples, and features by prompt."""

    rows: Split
    train: Sequence[Example]
    sets: Sequence[JudgedSet]
    features: FeaturesByPrompt


def read_split(train: Sequence[str], data: Sequence[str], limit: int, seed: int) -> Split:
    """Reads each file once and splits the rows. Raises DataError."""
    train_sources, data_sources = ([*dict.fromkeys(map(parse_source, s))] for s in (train, data))
    sources = [*dict.fromkeys([*train_sources, *data_sources])]
    if len({source.name for source in sources}) < len(sources):
        raise DataError("two files have the same name, which names their tables: rename one")
    sets = {source: read_rows(source, limit, seed) for source in sources}
    return split(sets, train_sources, data_sources)


def prepare(
    rows: Split,
    extractor: FeatureExtractor | None,
    store: FeatureStore | None,
    max_tokens: int,
    seed: int,
    progress: ReportProgress,
) -> PreparedData:
    """Extracts the features of all rows, or none without an extractor.

    Training rows are shuffled, because a service receives outcomes in mixed order.
    """
    known = _features(rows, extractor, store, progress) if extractor else {}
    order = np.random.default_rng(seed).permutation(len(rows.train))
    train = examples_of([rows.train[i] for i in order], known, max_tokens)
    sets = [
        JudgedSet(p.name, p.in_domain, p.rows, examples_of(p.rows, known, max_tokens))
        for p in rows.judged
    ]
    return PreparedData(rows, train, sets, known)


def _features(
    rows: Split, extractor: FeatureExtractor, store: FeatureStore | None, progress: ReportProgress
) -> FeaturesByPrompt:
    def make(prompts: Sequence[Prompt]) -> list[Features]:
        return extract_all(prompts, extractor, progress)

    known: dict[Prompt, Features] = {}
    for prompts in _prompts_by_set(rows):
        known |= zip(prompts, store.get(prompts, make) if store else make(prompts), strict=True)
    return known


def _prompts_by_set(rows: Split) -> list[list[Prompt]]:
    """Returns the unique sorted prompts of each set. The store's key then does not depend on the
    split."""
    sets: defaultdict[str, set[Prompt]] = defaultdict(set)
    for part in [rows.train, *(judged.rows for judged in rows.judged)]:
        for row in part:
            sets[row.data].add(prompt_of(row))
    return [sorted(prompts, key=astuple) for prompts in sets.values()]


def open_store(folder: str, encoder: str) -> FeatureStore | None:
    """Raises DataError when the folder cannot be created."""
    try:
        return FeatureStore(Path(folder), encoder) if folder else None
    except OSError as error:
        raise DataError(f"the cache {folder} cannot be used: {error}") from None

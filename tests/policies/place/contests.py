"""Helpers for placement tests: candidates from a random snapshot, and their cached prefix
lengths."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.policies.parameters import resolve
from services.policies.place.placements import PLACEMENTS
from services.policies.snapshot import Candidates, Snapshot
from tests.policies.made_snapshots import ranking


def placed(place: str, asked: Candidates, **params: float) -> list[int]:
    chosen = PLACEMENTS[place]
    at: list[int] = chosen.assign(asked, resolve(place, chosen.params, params)).tolist()
    return at


def narrowed(snapshot: Snapshot, seed: int) -> Candidates:
    """All rows of the snapshot in random order, with a random cached prefix per row and worker."""
    rng = np.random.default_rng(seed)
    count = len(snapshot.queued) + len(snapshot.running)
    ranked = ranking(snapshot, rng.permutation(count).astype(float))
    order = np.argsort(ranked.key)
    rows, runs = ranked.rows[order], order >= ranked.split
    made = snapshot.jobs.select(rows)
    most = np.repeat(made.prompt[:, None], len(snapshot.workers), axis=1)
    cached = rng.integers(0, most + 1) if len(rows) else np.zeros((0, 0), np.int64)
    key = ranked.key[order]
    return Candidates(3, snapshot.now, rows, runs, key, key, made, snapshot.workers, cached)


def with_cached(asked: Candidates, cached: Sequence[Sequence[int]]) -> Candidates:
    return replace(asked, cached=np.array(cached, np.int64))

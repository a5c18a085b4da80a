"""Synthetic requests with answer lengths that follow known features."""

from collections.abc import Sequence

import numpy as np

from services.predictor.interface import LAYERS, NUMBERS, Example, Features, Query

DIM = 16


def features(
    meaning: np.ndarray, words: Sequence[int] = (), user_input_chars: float = 40.0
) -> Features:
    """`meaning` [DIM] is the user input's embedding in every layer; there is no instruction."""
    unit = (meaning / np.linalg.norm(meaning)).astype(np.float32)
    numbers = np.zeros(len(NUMBERS), np.float32)
    numbers[0] = np.log1p(user_input_chars)
    return Features(
        np.zeros((LAYERS, DIM), np.float32),
        np.tile(unit, (LAYERS, 1)),
        np.array(sorted(words), np.int32),
        numbers,
    )


def query(given: Features | None, application: str = "chat", model: str = "m") -> Query:
    return Query(model, application, 10, 4_096, given)


def examples(n: int, seed: int, application: str = "chat", factor: float = 1.0) -> list[Example]:
    """Half of the log length follows from the embedding, half from words; a tenth is noise."""
    rng = np.random.default_rng(seed)
    direction = np.random.default_rng(0).normal(size=DIM)
    made = []
    for _ in range(n):
        meaning = rng.normal(size=DIM)
        words = rng.choice(20, size=4, replace=False)
        along = meaning @ direction / np.linalg.norm(meaning) / np.linalg.norm(direction)
        log_length = 4 + 1.5 * along + 0.1 * (words < 10).sum() * 2 + 0.1 * rng.normal()
        length = max(1, round(factor * float(np.exp(log_length))))
        asked = query(features(meaning, words.tolist()), application)
        made.append(Example(asked, length))
    return made


def lengths(of: Sequence[Example]) -> np.ndarray:
    return np.array([float(example.output_tokens) for example in of])

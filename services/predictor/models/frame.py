"""A batch of queries as columns, the input of models."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from services.predictor.interface import Columns, Features, Query


@dataclass(frozen=True)
class Frame:
    """Columns of n queries with features of one encoder.

    instruction, user_input: [n, layers, dim]. numbers: [n, numbers].
    words: hashed columns of all rows; row i has words[starts[i]:starts[i + 1]].
    """

    instruction: NDArray[np.float32]
    user_input: NDArray[np.float32]
    numbers: NDArray[np.float32]
    words: Columns
    starts: NDArray[np.int64]
    models: tuple[str, ...]
    applications: tuple[str, ...]

    @staticmethod
    def from_queries(queries: Sequence[Query]) -> "Frame":
        """Raises ValueError for a query without features."""
        features = [_featured(query) for query in queries]
        return Frame(
            np.stack([f.instruction for f in features]),
            np.stack([f.user_input for f in features]),
            np.stack([f.numbers for f in features]),
            np.concatenate([f.words for f in features]),
            np.cumsum([0, *(len(f.words) for f in features)]),
            tuple(q.model for q in queries),
            tuple(q.application for q in queries),
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def select_rows(self, rows: NDArray[np.int64]) -> "Frame":
        sizes = np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
        return Frame(
            self.instruction[rows],
            self.user_input[rows],
            self.numbers[rows],
            self.words[np.repeat(self.starts[:-1][rows], sizes) + within],
            starts,
            tuple(self.models[i] for i in rows),
            tuple(self.applications[i] for i in rows),
        )


def prompts(frame: Frame) -> NDArray[np.int64]:
    """Prompt number of each row: rows with equal sentence embeddings, or equal words when there are
    no embeddings, share a number."""
    if frame.user_input.any() or frame.instruction.any():
        meant = zip(frame.user_input[:, -1], frame.instruction[:, -1], strict=True)
        texts = [a.tobytes() + b.tobytes() for a, b in meant]
    else:
        texts = [words.tobytes() for words in np.split(frame.words, frame.starts[1:-1])]
    keys = [blake2b(text, digest_size=8).digest() for text in texts]
    return np.asarray(np.unique(keys, return_inverse=True)[1], np.int64)


def sentences(layers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Unit sentence embeddings [n, dim] from hidden states [n, layers, dim]."""
    last = layers[:, -1]
    return np.asarray(last / np.maximum(np.linalg.norm(last, axis=1, keepdims=True), 1e-9))


def states(frame: Frame) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """All hidden states of the instruction and of the user input, [n, layers · dim] each."""
    n = len(frame)
    return frame.instruction.reshape(n, -1), frame.user_input.reshape(n, -1)


def _featured(query: Query) -> Features:
    if query.features is None:
        raise ValueError("a prompt model needs queries with features")
    return query.features

"""Packs features into bytes for the outcome log: 3 to 7 kB per prompt, without text.

A header (version, which embeddings follow, counts of numbers, dimensions and words), then
embeddings in float16, numbers in float32 and words in int32, little-endian. Zero embeddings are
omitted.
"""

import math
import struct

import numpy as np
from numpy.typing import NDArray

from services.predictor.encoder.words import MAX_WORDS
from services.predictor.interface import LAYERS, NUMBERS, WORD_COLUMNS, Columns, Features, Vector

VERSION = 2
_HEADER = struct.Struct("<BBBHH")
_INSTRUCTION, _USER_INPUT = 1, 2


def pack(features: Features) -> bytes:
    """Packs features. Embeddings are rounded to float16 (5e-4 per value of a unit vector); the rest
    is exact.

    Raises ValueError for invalid features: wrong shape, not finite or out of range.
    """
    parts = (features.instruction, features.user_input)
    dim = parts[0].shape[-1]
    if any(part.shape != (LAYERS, dim) for part in parts):
        raise ValueError(f"both embeddings must have the shape [{LAYERS}, dimension]")
    present = [bool(part.any()) for part in parts]
    flags = _INSTRUCTION * present[0] | _USER_INPUT * present[1]
    sizes = (len(features.numbers), dim, len(features.words))
    _require(features)
    return b"".join(
        [
            _HEADER.pack(VERSION, flags, *sizes),
            *(part.astype("<f2").tobytes() for part in parts if part.any()),
            features.numbers.astype("<f4").tobytes(),
            features.words.astype("<i4").tobytes(),
        ]
    )


def is_current_version(data: bytes) -> bool:
    """Returns whether the data has the current version; other versions cannot be read."""
    return data[:1] == bytes([VERSION])


def unpack(data: bytes) -> Features:
    """Raises ValueError for another version, a wrong length or invalid values."""
    if len(data) < _HEADER.size or data[0] != VERSION:
        raise ValueError(f"not features of version {VERSION}")
    _, flags, numbers, dim, words = _HEADER.unpack_from(data)
    shape = (flags.bit_count(), LAYERS, dim)
    after = _HEADER.size + 2 * math.prod(shape)
    if flags > 3 or len(data) != after + 4 * (numbers + words):
        raise ValueError("the packed features have a wrong length")
    parts = np.frombuffer(data, "<f2", math.prod(shape), _HEADER.size).astype(np.float32)
    features = Features(
        *_embeddings(flags, parts.reshape(shape)),
        np.frombuffer(data, "<i4", words, after + 4 * numbers).astype(np.int32),
        np.frombuffer(data, "<f4", numbers, after).astype(np.float32),
    )
    _require(features)
    return features


def _embeddings(flags: int, parts: Vector) -> tuple[Vector, Vector]:
    zeros = np.zeros(parts.shape[1:], np.float32)
    instruction = parts[0] if flags & _INSTRUCTION else zeros
    return instruction, parts[-1] if flags & _USER_INPUT else zeros


def _require(features: Features) -> None:
    parts = (features.instruction, features.user_input, features.numbers)
    floats = np.concatenate([part.ravel() for part in parts])
    if not np.isfinite(floats).all() or len(features.numbers) != len(NUMBERS):
        raise ValueError("the features have non-finite values or a wrong count of numbers")
    if np.abs(floats[: -len(NUMBERS)]).max(initial=0) > 2:
        raise ValueError("an embedding does not have unit length")
    if len(features.words) > MAX_WORDS or not _ascend(features.words):
        raise ValueError("word columns must be ascending and in range")


def _ascend(words: Columns) -> bool:
    bounded: NDArray[np.int64] = np.concatenate([[-1], words, [WORD_COLUMNS]])
    return bool((np.diff(bounded) > 0).all())

"""Extracts features of prompts and caches them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from threading import Lock
from typing import Protocol, TypeVar

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from services.predictor.encoder import words
from services.predictor.interface import LAYERS, Columns, Features, Prompt, Vector

_NO_EMBEDDING: Vector = np.zeros((1, 1), np.float32)
_NO_EMBEDDING.flags.writeable = False


class TextEncoder(Protocol):
    """Texts → [n, LAYERS, dim] float32, unit length or zeros; reads `head_chars` characters per
    text."""

    @property
    def head_chars(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]: ...


class FeatureExtractor(Protocol):
    """Extracts features of prompts, in order."""

    def extract(self, prompts: Sequence[Prompt], /) -> list[Features]: ...


def cut(text: str, max_bytes: int) -> str:
    """Truncates the text to at most `max_bytes` of UTF-8."""
    if len(text) * 4 <= max_bytes:
        return text
    head = text[:max_bytes].encode("utf-8", "surrogatepass")[:max_bytes]
    return head.decode(errors="ignore")


def split_prompt(instruction: str, user_input: str) -> tuple[str, str]:
    """Returns (instruction, user input). Without an instruction, the first line of a multi-line
    user input is the instruction, as in the prompts of Alpaca and Magnus."""
    if instruction:
        return instruction, user_input
    first, _, rest = user_input.lstrip().partition("\n")
    return (first.rstrip(), rest.strip()) if rest and not rest.isspace() else ("", user_input)


@dataclass(frozen=True, slots=True)
class _EncodedPart:
    """Features of one part of a prompt."""

    vector: Vector
    columns: Columns


@dataclass(frozen=True, slots=True)
class _SplitPrompt:
    """A prompt's two texts and their cache keys."""

    prompt: Prompt
    instruction: str
    user_input: str
    keys: tuple[bytes, bytes]


class Extractor:
    """Extracts embeddings and words with an LRU cache of `cache_entries` parts and as many prompts.

    An entry takes up to 6.7 kB with 384 dimensions. Thread-safe; two threads may compute the same
    part twice.
    """

    def __init__(self, encoder: TextEncoder, cache_entries: int = 4_096):
        self._encoder = encoder
        self._head_chars = max(encoder.head_chars, words.HEAD_CHARS)
        self._parts: LRUCache[bytes, _EncodedPart] = LRUCache(cache_entries)
        self._bags: LRUCache[tuple[bytes, bytes], Columns] = LRUCache(cache_entries)
        self._lock = Lock()  # for both caches: an LRU lookup also writes

    def extract(self, texts: Sequence[Prompt]) -> list[Features]:
        """Returns features in order. A repeated part is encoded once."""
        split = [self._read(prompt) for prompt in texts]
        known = self._parts_by_key(split)
        return [self._features(parts, known) for parts in split]

    def _read(self, prompt: Prompt) -> _SplitPrompt:
        instruction, user_input = split_prompt(prompt.instruction, prompt.user_input)
        keys = (self._key(instruction), self._key(user_input))
        return _SplitPrompt(prompt, instruction, user_input, keys)

    def _key(self, text: str) -> bytes:
        """Hash of the text that is read; prompts that differ only after it share their features."""
        head = text[: self._head_chars].encode("utf-8", "surrogatepass")
        return blake2b(head, digest_size=16).digest()

    def _parts_by_key(self, split: Iterable[_SplitPrompt]) -> dict[bytes, _EncodedPart]:
        """Returns all parts, from the cache or computed in one batch."""
        known: dict[bytes, _EncodedPart] = {}
        new: dict[bytes, str] = {}
        for parts in split:
            for key, text in zip(parts.keys, (parts.instruction, parts.user_input), strict=True):
                if key in known or key in new:
                    continue
                if (part := self._cached_part(key)) is None:
                    new[key] = text
                else:
                    known[key] = part
        return known | self._compute(new)

    def _compute(self, new: dict[bytes, str]) -> dict[bytes, _EncodedPart]:
        if not new:
            return {}
        vectors = self._encoder.encode(list(new.values()))
        computed = {
            key: _EncodedPart(_read_only(vector.copy()), _read_only(words.columns(text)))
            for (key, text), vector in zip(new.items(), vectors, strict=True)
        }
        with self._lock:
            self._parts.update(computed)
        return computed

    def _cached_part(self, key: bytes) -> _EncodedPart | None:
        with self._lock:
            return self._parts.get(key)

    def _features(self, parts: _SplitPrompt, known: dict[bytes, _EncodedPart]) -> Features:
        instruction, user_input = (known[key] for key in parts.keys)
        with self._lock:
            columns = self._bags.get(parts.keys)
        if columns is None:
            columns = _read_only(words.bag(instruction.columns, user_input.columns))
            with self._lock:
                self._bags[parts.keys] = columns
        numbers = _numbers(parts.prompt, parts.instruction, parts.user_input)
        return Features(instruction.vector, user_input.vector, columns, numbers)


class NoEncoder:
    """Zero embeddings, for predictors that read words and sizes only."""

    head_chars = 0

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.zeros((len(texts), LAYERS, 1), np.float32)


def word_features(prompt: Prompt) -> Features:
    """Features without embeddings, computed without an encoder."""
    instruction, user_input = split_prompt(prompt.instruction, prompt.user_input)
    bag = words.bag(words.columns(instruction), words.columns(user_input))
    return Features(_NO_EMBEDDING, _NO_EMBEDDING, bag, _numbers(prompt, instruction, user_input))


def without_embeddings(features: Features) -> Features:
    """Returns the features without their embeddings."""
    return replace(features, instruction=_NO_EMBEDDING, user_input=_NO_EMBEDDING)


def _numbers(prompt: Prompt, instruction: str, user_input: str) -> Vector:
    """Sizes in the order of NUMBERS."""
    answers = prompt.answers
    counts = (
        len(user_input),
        len(instruction),
        prompt.prompt_tokens,
        len(answers),
        answers[-1] if answers else 0,
        sum(answers) / len(answers) if answers else 0,
        words.largest_number(instruction, user_input),
        words.count(user_input),
    )
    return np.array([math.log1p(max(count, 0)) for count in counts], np.float32)


Array = TypeVar("Array", Vector, Columns)


def _read_only(array: Array) -> Array:
    """Marks the array read-only, because cached features share it."""
    array.flags.writeable = False
    return array

"""Prompt → Features, with what was computed before kept."""

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

_BLANK: Vector = np.zeros((1, 1), np.float32)
_BLANK.flags.writeable = False


class TextEncoder(Protocol):
    """Texts → [n, LAYERS, dim] float32, unit length or zeros; reads a text's `head_chars`."""

    @property
    def head_chars(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]: ...


class Extracts(Protocol):
    """Makes features of prompts; one each, in order."""

    def extract(self, prompts: Sequence[Prompt], /) -> list[Features]: ...


def cut(text: str, max_bytes: int) -> str:
    """The text's head of at most so many bytes of UTF-8."""
    if len(text) * 4 <= max_bytes:
        return text
    head = text[:max_bytes].encode("utf-8", "surrogatepass")[:max_bytes]
    return head.decode(errors="ignore")


def split_prompt(instruction: str, user_input: str) -> tuple[str, str]:
    """(instruction, user input); where only an input is given and its first line is followed by
    more text, that line is the instruction, as in Alpaca's prompts and Magnus' tasks."""
    if instruction:
        return instruction, user_input
    first, _, rest = user_input.lstrip().partition("\n")
    return (first.rstrip(), rest.strip()) if rest and not rest.isspace() else ("", user_input)


@dataclass(frozen=True, slots=True)
class _Part:
    """What stands for one part's text, whatever prompt it is in."""

    vector: Vector
    columns: Columns


@dataclass(frozen=True, slots=True)
class _Parts:
    """A prompt's two texts and the keys of what is read of them."""

    prompt: Prompt
    instruction: str
    user_input: str
    keys: tuple[bytes, bytes]


class Extractor:
    """Texts' embeddings and words, computed once while they are remembered.

    cache_entries: parts remembered, 1 or more, and as many prompts; the least recently used goes
    first. An entry is up to 6.7 kB with 384 dimensions. Safe to call from several threads, which
    may at worst compute the same part twice.
    """

    def __init__(self, encoder: TextEncoder, cache_entries: int = 4_096):
        self._encoder = encoder
        self._head_chars = max(encoder.head_chars, words.HEAD_CHARS)
        self._parts: LRUCache[bytes, _Part] = LRUCache(cache_entries)
        self._bags: LRUCache[tuple[bytes, bytes], Columns] = LRUCache(cache_entries)
        self._lock = Lock()  # of both; even a look changes their order

    def extract(self, texts: Sequence[Prompt]) -> list[Features]:
        """One a prompt, in order. Parts that occur twice are encoded once."""
        asked = [self._read(prompt) for prompt in texts]
        known = self._know(asked)
        return [self._features(parts, known) for parts in asked]

    def _read(self, prompt: Prompt) -> _Parts:
        instruction, user_input = split_prompt(prompt.instruction, prompt.user_input)
        keys = (self._key(instruction), self._key(user_input))
        return _Parts(prompt, instruction, user_input, keys)

    def _key(self, text: str) -> bytes:
        """Of the part that is read: prompts that differ beyond it have the same features."""
        head = text[: self._head_chars].encode("utf-8", "surrogatepass")
        return blake2b(head, digest_size=16).digest()

    def _know(self, asked: Iterable[_Parts]) -> dict[bytes, _Part]:
        """Every part asked for, out of the cache or computed in one batch."""
        known: dict[bytes, _Part] = {}
        new: dict[bytes, str] = {}
        for parts in asked:
            for key, text in zip(parts.keys, (parts.instruction, parts.user_input), strict=True):
                if key in known or key in new:
                    continue
                if (part := self._remembered(key)) is None:
                    new[key] = text
                else:
                    known[key] = part
        return known | self._compute(new)

    def _compute(self, new: dict[bytes, str]) -> dict[bytes, _Part]:
        if not new:
            return {}
        vectors = self._encoder.encode(list(new.values()))
        made = {
            key: _Part(_shared(vector.copy()), _shared(words.columns(text)))
            for (key, text), vector in zip(new.items(), vectors, strict=True)
        }
        with self._lock:
            self._parts.update(made)
        return made

    def _remembered(self, key: bytes) -> _Part | None:
        with self._lock:
            return self._parts.get(key)

    def _features(self, parts: _Parts, known: dict[bytes, _Part]) -> Features:
        instruction, user_input = (known[key] for key in parts.keys)
        with self._lock:
            columns = self._bags.get(parts.keys)
        if columns is None:
            columns = _shared(words.bag(instruction.columns, user_input.columns))
            with self._lock:
                self._bags[parts.keys] = columns
        numbers = _numbers(parts.prompt, parts.instruction, parts.user_input)
        return Features(instruction.vector, user_input.vector, columns, numbers)


class NoEncoder:
    """Texts without meaning: for predictors that read words and sizes alone."""

    head_chars = 0

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.zeros((len(texts), LAYERS, 1), np.float32)


def without_meaning(prompt: Prompt) -> Features:
    """Its words and sizes, and embeddings of one zero: what needs no encoder."""
    instruction, user_input = split_prompt(prompt.instruction, prompt.user_input)
    bag = words.bag(words.columns(instruction), words.columns(user_input))
    return Features(_BLANK, _BLANK, bag, _numbers(prompt, instruction, user_input))


def wording(features: Features) -> Features:
    """The same of a prompt that was read."""
    return replace(features, instruction=_BLANK, user_input=_BLANK)


def _numbers(prompt: Prompt, instruction: str, user_input: str) -> Vector:
    """In the order of NUMBERS."""
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


def _shared(array: Array) -> Array:
    """Read-only, since cached features hand out the same array again."""
    array.flags.writeable = False
    return array

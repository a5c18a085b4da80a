"""Hashes a prompt's words to columns, identically in every process and version."""

import re
from zlib import crc32

import numpy as np

from services.predictor.interface import WORD_COLUMNS, Columns

MAX_WORDS = 512  # columns per prompt
INSTRUCTION_SHARE = 128  # reserved for the instruction when the user input could fill all columns
HEAD_CHARS = 4_096  # per part: enough for MAX_WORDS words in any language

_WORD = re.compile(r"\w+|[^\w\s]")
_WHOLE_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"(?<!\d)[0-9]{1,6}(?!\d)")
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing
_START = np.array([2**32], np.uint64)  # predecessor of the first word; not the hash of any word
_SHIFT = np.uint64(64 - (WORD_COLUMNS - 1).bit_length())


def columns(text: str) -> Columns:
    """Hashed lower-case words, signs and word pairs of the text's head: at most MAX_WORDS unique
    columns in order of first occurrence. O(HEAD_CHARS)."""
    words = _WORD.findall(text[:HEAD_CHARS].lower())[:MAX_WORDS]
    hashes = [crc32(word.encode("utf-8", "surrogatepass")) for word in words]
    one = np.array(hashes, np.uint64)
    before = np.concatenate([_START, one[:-1]])[: len(one)]
    pair = (before + np.uint64(1)) * _MIX + one
    both = np.stack([one, pair], 1).ravel()
    both ^= both >> np.uint64(32)
    hashed = (both * _MIX >> _SHIFT).astype(np.int32)
    _, first = np.unique(hashed, return_index=True)
    kept: Columns = hashed[np.sort(first)[:MAX_WORDS]]
    return kept


def largest_number(*texts: str) -> int:
    """Largest number of at most six digits in the texts' heads; 0 for none."""
    found = (int(digits) for text in texts for digits in _NUMBER.findall(text[:HEAD_CHARS]))
    return max(found, default=0)


def count(text: str) -> int:
    """Number of words in the text's head, without signs."""
    return sum(1 for _ in _WHOLE_WORD.finditer(text[:HEAD_CHARS]))


def bag(instruction: Columns, user_input: Columns) -> Columns:
    """Merges both parts' columns: ascending, unique, at most MAX_WORDS.

    Each part keeps its first columns, so that neither a long instruction nor a long input displaces
    the other.
    """
    share = max(INSTRUCTION_SHARE, MAX_WORDS - len(user_input))
    head = instruction[:share]
    kept: Columns = np.unique(np.concatenate([head, user_input[: MAX_WORDS - len(head)]]))
    return kept

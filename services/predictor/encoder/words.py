"""A prompt's words as a bag of hashed columns, the same in every process and version."""

import re
from zlib import crc32

import numpy as np

from services.predictor.interface import WORD_COLUMNS, Columns

MOST_WORDS = 512  # columns of one prompt
INSTRUCTION_SHARE = 128  # of these, where the user input alone would fill them
HEAD_CHARS = 4_096  # of a part: more words than there are columns for, in any language

_WORD = re.compile(r"\w+|[^\w\s]")
_WHOLE_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"(?<!\d)[0-9]{1,6}(?!\d)")
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing
_START = np.array([2**32], np.uint64)  # stands before the first word; no word's hash
_SHIFT = np.uint64(64 - (WORD_COLUMNS - 1).bit_length())


def columns(text: str) -> Columns:
    """Lower-cased words and signs of the text's head, and pairs of neighbours: at most MOST_WORDS
    columns, once each, in the order they first stand in the text. O(HEAD_CHARS)."""
    words = _WORD.findall(text[:HEAD_CHARS].lower())[:MOST_WORDS]
    hashes = [crc32(word.encode("utf-8", "surrogatepass")) for word in words]
    one = np.array(hashes, np.uint64)
    before = np.concatenate([_START, one[:-1]])[: len(one)]
    pair = (before + np.uint64(1)) * _MIX + one
    both = np.stack([one, pair], 1).ravel()
    both ^= both >> np.uint64(32)
    hashed = (both * _MIX >> _SHIFT).astype(np.int32)
    _, first = np.unique(hashed, return_index=True)
    kept: Columns = hashed[np.sort(first)[:MOST_WORDS]]
    return kept


def largest_number(*texts: str) -> int:
    """The largest of at most six digits that their heads name; 0 for none."""
    found = (int(digits) for text in texts for digits in _NUMBER.findall(text[:HEAD_CHARS]))
    return max(found, default=0)


def count(text: str) -> int:
    """Words of the text's head, signs aside."""
    return sum(1 for _ in _WHOLE_WORD.finditer(text[:HEAD_CHARS]))


def bag(instruction: Columns, user_input: Columns) -> Columns:
    """One bag of both parts' columns: ascending, once each, at most MOST_WORDS.

    What each says first is kept; a long instruction does not crowd out the user input, which
    tells prompts of one application apart, nor a long input the instruction.
    """
    share = max(INSTRUCTION_SHARE, MOST_WORDS - len(user_input))
    head = instruction[:share]
    kept: Columns = np.unique(np.concatenate([head, user_input[: MOST_WORDS - len(head)]]))
    return kept

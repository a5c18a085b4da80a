"""PromptLookup: drafts of a request's next tokens, copied from earlier in its own text.

The last tokens of prompt and answer are looked up in the text before them; the tokens that followed
there are the draft (prompt lookup, Saxena, 2023). The index is that of LZ77 compressors: one table
from the hash of an n-gram to its last occurrence, and for each occurrence the one before it. It
costs 4 bytes per token of text, and 8 to 16 for the table.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

import numpy as np

# Earlier occurrences that one search examines, latest first: this bounds its time.
MAX_EXAMINED = 16
LEAST_BITS = 6  # of an index into the table


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Most tokens of a draft, 0 for none, and how many tokens before it must occur earlier: at
    least `shortest`. Of several occurrences the one with the longest match counts, up to
    `longest`."""

    most: int = 0
    shortest: int = 3
    longest: int = 8


NO_DRAFTS = DraftLimits()


class PromptLookup:
    """The index of one request's text, which only grows.

    The next draft is as long as the accepted part of the last one, and twice as long if all of it
    was accepted: text that does not repeat itself costs little.
    """

    def __init__(self, limits: DraftLimits):
        self.most = limits.most  # of the next draft
        self._limits = limits
        self._last = array("i")  # by hash: the end of its last occurrence; 0: none
        self._before = array("i")  # by end - shortest: the end of the occurrence before; 0: none

    def propose(self, tokens: Seq[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `tokens`, which extend those of the last call;
        empty without an earlier occurrence. A draft that reaches the end of the text goes on with
        its own beginning, as the text repeats itself.

        O(new tokens + MAX_EXAMINED · longest), amortised.
        """
        self._add(tokens)
        end, most = len(tokens), min(most, self.most)
        start = self._find(tokens) if most > 0 else 0
        if not start:
            return []
        return [tokens[start + i % (end - start)] for i in range(most)]

    def record(self, drafted: int, accepted: int) -> None:
        """Sets the length of the next draft by what became of the last one."""
        grown = max(self.most, 2 * drafted) if accepted == drafted else accepted
        self.most = min(self._limits.most, max(1, grown))

    def _find(self, tokens: Seq[int]) -> int:
        """The end of the earlier occurrence with the longest match, the latest of equal ones; 0
        without one."""
        shortest, longest = self._limits.shortest, self._limits.longest
        end = len(tokens)
        if end < shortest:
            return 0
        best, found, at = shortest - 1, 0, self._before[end - shortest]
        for _ in range(MAX_EXAMINED):
            if not at or best >= longest:
                break
            if tokens[at - 1] == tokens[end - 1]:  # else only the hashes are equal
                matched = _matched(tokens, at, longest)
                if matched > best:
                    best, found = matched, at
            at = self._before[at - shortest]
        return found

    def _add(self, tokens: Seq[int]) -> None:
        """Adds the n-grams that end after those already here."""
        shortest, before, last = self._limits.shortest, self._before, self._last
        count = len(tokens) + 1 - shortest
        if count > len(last) // 2:
            self._build(tokens, count)
            return
        mask = len(last) - 1
        for first in range(len(before), count):
            end = first + shortest
            key = hash(tuple(tokens[first:end])) & mask
            before.append(last[key])
            last[key] = end

    def _build(self, tokens: Seq[int], count: int) -> None:
        """Builds the index with a table of two to four times the number of n-grams."""
        shortest = self._limits.shortest
        places = 1 << max(LEAST_BITS, (2 * count).bit_length())
        ngrams = zip(*(islice(tokens, place, None) for place in range(shortest)), strict=False)
        keys = np.fromiter(map(hash, ngrams), np.int64, count) & (places - 1)
        ends = np.arange(shortest, shortest + count, dtype=np.intc)
        order = np.argsort(keys, kind="stable")
        again = np.flatnonzero(keys[order][1:] == keys[order][:-1])
        before, last = np.zeros(count, np.intc), np.zeros(places, np.intc)
        before[order[again + 1]] = ends[order[again]]
        last[keys] = ends  # of equal keys the last one stays
        self._before, self._last = array("i", before.tobytes()), array("i", last.tobytes())


def _matched(tokens: Seq[int], at: int, longest: int) -> int:
    """How many tokens before `at` equal the last ones, at most `longest`."""
    end = len(tokens)
    for length in range(min(longest, at)):
        if tokens[at - 1 - length] != tokens[end - 1 - length]:
            return length
    return min(longest, at)

"""Retokenizer: token ids for the text of an answer that arrives in pieces. Pure."""

from collections.abc import Iterator

from tokenizers import Tokenizer

# Texts before a piece: a tokenizer may add a space before the first word of a text, or none after a
# line feed. The first one for which the tokens have the text of the piece counts.
CONTEXTS = ("", "a", "\n")
TAIL = 8  # tokens before a piece that may change how it decodes
MAX_WAITING = 64  # characters without tokens of their text


class Retokenizer:
    """Finds tokens such that the decoding of all of them is the text of all pieces.

    Each piece is tokenized on its own: a server sends the text of one token or of a few at a time,
    which gives its own tokens again in most cases. If the tokens of a piece would change the text,
    it waits for the next one. O(piece).
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tail: list[int] = []
        self._waiting = ""

    def feed(self, text: str) -> list[int]:
        """The tokens of the next piece; empty if it waits for more."""
        self._waiting += text
        if not self._waiting:
            return []
        for ids in self._candidates(self._waiting):
            if self._adds(ids, self._waiting):
                return self._take(ids)
        return self.flush() if len(self._waiting) > MAX_WAITING else []

    def flush(self) -> list[int]:
        """Tokens for the text that waits, even if their text differs from it: a tokenizer may lack
        a character, or normalize the text."""
        if not self._waiting:
            return []
        return self._take(next(self._candidates(self._waiting)))

    def _candidates(self, text: str) -> Iterator[list[int]]:
        for context in CONTEXTS:
            before = self._encode(context)
            ids = self._encode(context + text)
            if ids[: len(before)] == before:
                yield ids[len(before) :]

    def _adds(self, ids: list[int], text: str) -> bool:
        return bool(ids) and self._decode(self._tail + ids) == self._decode(self._tail) + text

    def _take(self, ids: list[int]) -> list[int]:
        self._waiting = ""
        self._tail = (self._tail + ids)[-TAIL:]
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

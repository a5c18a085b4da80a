"""Incremental detokenization and the search for stop strings. Pure."""

import logging
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence, Set

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

log = logging.getLogger(__name__)

UTF8_DECODER = getincrementaldecoder("utf-8")


class AnswerDetokenizer:
    """Decodes the tokens of one answer incrementally, never splitting a character.

    The joined results of `feed` and `flush` are the decoding of all tokens. A last token in
    `silent` that ends the answer adds no text.
    """

    def __init__(self, silent: Set[int] = frozenset()):
        self._silent = silent
        self._held: list[int] = []  # a silent last token, until more tokens follow

    def feed(self, token_ids: Sequence[int]) -> str:
        """The new text; empty while a character is incomplete."""
        if not self._silent:
            return self._decode(token_ids)
        ids = [*self._held, *token_ids]
        self._held = [ids.pop()] if ids and ids[-1] in self._silent else []
        return self._decode(ids) if ids else ""

    def flush(self, stopped: bool = False) -> str:
        """The rest at the end of the answer; an incomplete character is U+FFFD. `stopped`: the
        last token ended the answer."""
        held, self._held = self._held, []
        text = self._decode(held) if held and not stopped else ""
        return text + self._rest()

    def _decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError

    def _rest(self) -> str:
        """The text of the tokens that end within a character."""
        raise NotImplementedError


class ByteDetokenizer(AnswerDetokenizer):
    """For byte-level tokenizers: the text is the joined bytes of the tokens as UTF-8."""

    def __init__(self, token_bytes: Mapping[int, bytes], silent: Set[int] = frozenset()):
        super().__init__(silent)
        self._token_bytes = token_bytes
        self._utf8 = UTF8_DECODER("replace")

    def _decode(self, ids: Sequence[int]) -> str:
        token_bytes = self._token_bytes
        return self._utf8.decode(b"".join([token_bytes[token] for token in ids]))

    def _rest(self) -> str:
        return self._utf8.decode(b"", True)


class Detokenizer(AnswerDetokenizer):
    """For any tokenizer: the library's own incremental decoding."""

    def __init__(
        self,
        backend: Tokenizer,
        skip_special_tokens: bool = True,
        silent: Set[int] = frozenset(),
        unspaced: Mapping[int, str] | None = None,
    ):
        """`unspaced`: the texts of special tokens, if there is no space between two of them."""
        super().__init__(silent)
        self._backend = backend
        self._skips = skip_special_tokens
        self._unspaced = unspaced
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._tokens: list[int] = []
        self._emitted_chars = 0
        self._complete = True
        self._after_special = False

    def _decode(self, ids: Sequence[int]) -> str:
        return self._step(list(ids)) if self._unspaced is None else self._decode_unspaced(ids)

    def _step(self, ids: list[int]) -> str:
        self._tokens += ids
        try:
            text = self._stream.step(self._backend, ids)
        except Exception:  # the complete decoding does not extend the partial one
            log.warning("incremental decoding failed; decoding the answer again from its start")
            return self._restart()
        self._complete = text is not None
        if text is None:
            return ""
        self._emitted_chars += len(text)
        return text

    def _decode_unspaced(self, ids: Sequence[int]) -> str:
        assert self._unspaced is not None
        pieces = []
        for token in ids:
            piece = self._step([token])
            special = token in self._unspaced
            pieces.append(piece.lstrip(" ") if special and self._after_special else piece)
            self._after_special = special
        return "".join(pieces)

    def _rest(self) -> str:
        if self._complete:
            return ""
        whole = self._backend.decode(self._tokens, skip_special_tokens=self._skips)
        rest = whole[self._emitted_chars :]
        self._emitted_chars, self._complete = len(whole), True
        return rest

    def _restart(self) -> str:
        self._complete = False
        rest = self._rest()
        self._stream = DecodeStream(ids=self._tokens[-8:], skip_special_tokens=self._skips)
        return rest


class StopMatcher:
    """Finds the first completed stop string, and withholds text that may be its beginning.

    The result does not depend on how the text is split: it equals reading one character at a time.
    If one character completes two stop strings, the longer one counts.
    """

    def __init__(self, stops: Sequence[str], included: bool = False):
        """`included`: the found stop string is part of the text."""
        self._stops = tuple(stops)
        self._included = included
        self._held = ""
        self.found = ""  # the stop string, once it is found

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that can be sent, and whether a stop string ends it."""
        text = self._held + text
        ends = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if ends:
            self._held = ""
            end, at = min(ends)
            self.found = text[at:end]
            return text[: end if self._included else at], True
        keep = max(count_overlap(text, s) for s in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The withheld text, if the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held


def count_overlap(text: str, mark: str) -> int:
    """Length of the longest proper prefix of `mark` that `text` ends with. O(len(mark))."""
    longest = min(len(mark) - 1, len(text))
    return next((k for k in range(longest, 0, -1) if text.endswith(mark[:k])), 0)

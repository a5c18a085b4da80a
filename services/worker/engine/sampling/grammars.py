"""Grammars: compiles the grammars of requests in a thread.

A grammar is compiled once for all requests that have it: each gets a copy. Compilation takes
milliseconds, and the tokenizer of a large vocabulary a second, which no step waits for: a request
is added when its grammar is compiled.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.runtime.bounded_dict import BoundedDict
from services.worker.folder import load_tokenizer
from services.worker.requests.types.grammar import Words, short_reason

MAX_COMPILED = 256  # grammars kept for later requests, and for those that have not begun
WORD_BITS = 32  # tokens of one word of a mask
MAX_COMPILING = 64
# llguidance's defaults, with errors that do not repeat the grammar.
LIMITS = LLParserLimits(verbose_errors=False)


class Grammars:
    """The grammars of one model's requests. Used by one thread."""

    def __init__(self, folder: str, vocab_size: int, eos_ids: Iterable[int]):
        self._folder = folder
        self._vocab_size = vocab_size
        self.eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        self._tokenizer: LLTokenizer | None = None  # once the first grammar is compiled
        self._compiled = BoundedDict[str, Future[LLMatcher]](MAX_COMPILED)
        self._thread = ThreadPoolExecutor(1, "grammars")

    @property
    def words(self) -> int:
        """Words of a mask, once a grammar was compiled: of the model's vocabulary, or of the
        tokenizer's if that is larger."""
        size = self._tokenizer.vocab_size if self._tokenizer else self._vocab_size
        return -(-size // WORD_BITS)

    def allowed_words(self, token_ids: Seq[int]) -> Words | None:
        """The mask of these tokens; without any, of the model's vocabulary: None if that needs no
        mask."""
        if not token_ids and self.words == -(-self._vocab_size // WORD_BITS):
            return None
        bits = np.zeros(self.words * WORD_BITS, np.uint8)
        bits[list(token_ids) if token_ids else slice(self._vocab_size)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    @property
    def is_full(self) -> bool:
        """Whether so many grammars wait to be compiled that the next one had better be waited for.
        O(grammars)."""
        return sum(not each.done() for each in self._compiled.values()) >= MAX_COMPILING

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """A matcher at the beginning of this grammar, to be copied. The result raises ValueError
        with a sentence if the grammar is invalid or too complex, or the model's tokenizer cannot be
        used."""
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = self._thread.submit(self._compile, grammar)
        self._compiled[grammar] = compiled  # as the newest
        return compiled

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one takes longest; copies keep what it computes
        if matcher.is_error():
            raise ValueError(
                f"the schema or grammar cannot be used: {short_reason(matcher.get_error())}"
            )
        return matcher

    def _load(self) -> LLTokenizer:
        tokenizer = load_tokenizer(self._folder)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        size = max(self._vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        try:
            return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=sorted(self.eos_ids))
        except ValueError as error:
            raise ValueError(
                "answers cannot follow a schema or grammar, because llguidance does not support "
                f"the model's tokenizer: {short_reason(str(error))}"
            ) from None

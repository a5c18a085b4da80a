"""Grammars: compiles the grammars of requests in a thread.

A grammar is compiled once for all requests that have it: each gets a copy. No step waits for the
milliseconds that this takes, because a request is added when its grammar is compiled.
"""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.runtime.bounded_dict import BoundedDict
from services.worker.folder import load_tokenizer
from services.worker.requests.types.grammar import Words, short_reason
from services.worker.requests.types.prompt import Prompt

MAX_COMPILED = 256  # grammars kept for later requests, and for those that have not begun
WORD_BITS = 32  # tokens of one word of a mask
MAX_COMPILING = 64
# llguidance's defaults, with errors that do not repeat the grammar.
LIMITS = LLParserLimits(verbose_errors=False)

log = logging.getLogger(__name__)


class Grammars:
    """The grammars of one model's requests. Used by one thread."""

    def __init__(self, folder: str, vocab_size: int, eos_ids: Iterable[int]):
        self._folder = folder
        self._vocab_size = vocab_size
        self.eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._compiled = BoundedDict[str, Future[LLMatcher]](MAX_COMPILED)
        self._thread = ThreadPoolExecutor(1, "grammars")

    def load(self) -> None:
        """Loads the tokenizer before the worker serves: for a vocabulary of 128,000 tokens that
        takes a second, in which no other thread runs. Logs a warning if it cannot be used."""
        try:
            self._tokenizer = self._load()
        except ValueError as error:
            log.warning("requests with a schema or grammar are refused: %s", error)

    @property
    def words(self) -> int:
        """Words of a mask."""
        return -(-self._size // WORD_BITS)

    @property
    def _size(self) -> int:
        """Tokens of a mask, once the tokenizer is loaded: the model's vocabulary, or the
        tokenizer's if that is larger."""
        return self._tokenizer.vocab_size if self._tokenizer else self._vocab_size

    def allowed_words(self, token_ids: Seq[int]) -> Words | None:
        """The mask of these tokens; without any, of the model's vocabulary: None if that needs no
        mask."""
        if not token_ids and self._size == self._vocab_size:
            return None
        bits = np.zeros(self.words * WORD_BITS, np.uint8)
        bits[list(token_ids) if token_ids else slice(self._vocab_size)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    @property
    def is_full(self) -> bool:
        """Whether so many grammars wait for compilation that the engine waits for the next one.
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

    def prepare(self, grammar: str, on_ready: Callable[[], None]) -> bool:
        """Begins to compile a grammar; empty: none. Returns whether there is nothing to wait for;
        else another thread calls `on_ready` afterwards."""
        if not grammar:
            return True
        compiled = self.compile(grammar)
        if compiled.done() or self.is_full:
            return True
        compiled.add_done_callback(lambda _: on_ready())
        return False

    def check(self, prompt: Prompt) -> None:
        """Waits until the grammar of a prompt is compiled. Raises ValueError with a sentence if it
        cannot be used."""
        if prompt.sampling.grammar:
            self.compile(prompt.sampling.grammar).result()

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        try:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
            if not matcher.is_error():
                # The first mask takes longest; copies keep what it computes.
                matcher.compute_bitmask()
            why = matcher.get_error()
        except BaseException as error:  # a panic in Rust is no Exception
            raise ValueError(f"llguidance failed on the schema or grammar: {error!r}") from None
        if why:
            raise ValueError(f"the schema or grammar cannot be used: {short_reason(why)}")
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

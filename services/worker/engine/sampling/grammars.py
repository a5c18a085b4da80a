"""Grammars: compiles the grammars of requests in threads.

A grammar is compiled once for all requests that have it: each gets a copy. No step waits for the
milliseconds that this takes, because a request is added when its grammar is compiled. Large
grammars, which may take seconds, have threads of their own at low priority. llguidance releases the
interpreter's lock, and bounds the work and memory of a grammar by `LIMITS`.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Set
from collections.abc import Sequence as Seq
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from math import inf
from threading import Timer, get_native_id

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.worker.folder import load_tokenizer
from services.worker.requests.types.grammar import Words, short_reason

MAX_KEPT, MAX_KEPT_CHARS = 256, 2**22  # grammars kept for later requests, and their text
WORD_BITS = 32  # tokens of one word of a mask
MAX_COMPILING = 64
LARGE_CHARS = 2**14  # smaller ones take less than 0.1 s
SMALL_THREADS, LARGE_THREADS, LARGE_NICE = 2, 2, 10
# llguidance's defaults, with less memory for the states of a grammar's lexemes, about 100 MB, and
# errors that do not repeat the grammar.
LIMITS = LLParserLimits(max_lexer_states=2**16, verbose_errors=False)

TOO_MANY = (
    f"{MAX_COMPILING} schemas and grammars of other requests wait for compilation; retry later"
)
TOO_LONG = "the schema or grammar takes more than {limit_s:g} s to compile; make it simpler"

log = logging.getLogger(__name__)


class Grammars:
    """The grammars of one model's requests. Used by one thread."""

    def __init__(self, folder: str, vocab_size: int, eos_ids: Iterable[int], limit_s: float = inf):
        """`limit_s`: the longest that a request waits for its grammar."""
        self._folder = folder
        self._limit_s = limit_s
        self._vocab_size = vocab_size
        self.eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: dict[str, Future[LLMatcher]] = {}  # the most recently used ones last
        self._small = ThreadPoolExecutor(SMALL_THREADS, "grammars")
        self._large = ThreadPoolExecutor(LARGE_THREADS, "large-grammars", _lower_priority)

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

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """A matcher at the beginning of this grammar, to be copied. The result raises ValueError
        with a sentence if the grammar is invalid or too complex, takes too long, or the model's
        tokenizer cannot be used."""
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = self._begin(grammar)
        self._compiled[grammar] = compiled  # as the newest
        return compiled

    def prepare(
        self, grammar: str, on_ready: Callable[[], None], awaited: Callable[[], Set[str]]
    ) -> bool:
        """Begins to compile a grammar; empty: none. Returns whether there is nothing to wait for;
        else another thread calls `on_ready` afterwards. `awaited` returns the grammars of requests
        that have not begun, which are kept."""
        if not grammar or self.is_full:
            return True
        compiled = self.compile(grammar)
        if self.keeps_too_many:
            self.forget_unused(awaited() | {grammar})
        if compiled.done():
            return True
        compiled.add_done_callback(lambda _: on_ready())
        return False

    @property
    def is_full(self) -> bool:
        """Whether no other grammar can wait for its compilation. O(grammars)."""
        return sum(not each.done() for each in self._compiled.values()) >= MAX_COMPILING

    def find_fault(self, grammar: str) -> str:
        """Why a grammar cannot be used, a sentence; empty if it can be, or for none. Never waits: a
        grammar that is not compiled was not begun, because too many others wait."""
        if not grammar:
            return ""
        compiled = self._compiled.get(grammar)
        if compiled is None or not compiled.done():
            return TOO_MANY
        error = compiled.exception()
        return str(error) if error else ""

    def forget_unused(self, used: Set[str]) -> None:
        """Forgets the grammars used longest ago, but none of these and none that is compiled now,
        until what is kept is within its limits. O(grammars)."""
        kept, chars = 0, 0
        for grammar, compiled in [*self._compiled.items()][::-1]:
            if grammar not in used and compiled.done():
                kept, chars = kept + 1, chars + len(grammar)
                if kept > MAX_KEPT or chars > MAX_KEPT_CHARS:
                    del self._compiled[grammar]

    @property
    def keeps_too_many(self) -> bool:
        """Whether `forget_unused` may forget any. O(grammars)."""
        chars = sum(map(len, self._compiled))
        return len(self._compiled) > MAX_KEPT or chars > MAX_KEPT_CHARS

    def _begin(self, grammar: str) -> "Future[LLMatcher]":
        compiled: Future[LLMatcher] = Future()
        threads = self._small if len(grammar) < LARGE_CHARS else self._large
        threads.submit(self._finish, compiled, grammar)
        if self._limit_s < inf:
            timer = Timer(self._limit_s, _give_up, (compiled, self._limit_s))
            timer.daemon = True
            timer.start()
            compiled.add_done_callback(lambda _: timer.cancel())
        return compiled

    def _finish(self, compiled: "Future[LLMatcher]", grammar: str) -> None:
        """In a thread. A result after the time limit has no effect."""
        if compiled.done():
            return
        with suppress(InvalidStateError):
            try:
                compiled.set_result(self._compile(grammar))
            except ValueError as error:
                compiled.set_exception(error)

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


def _give_up(compiled: "Future[LLMatcher]", limit_s: float) -> None:
    with suppress(InvalidStateError):
        compiled.set_exception(ValueError(TOO_LONG.format(limit_s=limit_s)))


def _lower_priority() -> None:
    """Steps come before this thread, where the system has priorities of threads."""
    if sys.platform == "linux":
        with suppress(OSError):  # where it is forbidden
            os.setpriority(os.PRIO_PROCESS, get_native_id(), LARGE_NICE)

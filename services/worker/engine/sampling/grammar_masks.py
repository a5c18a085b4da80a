"""GrammarMasks: the tokens that grammars allow next, filled in a thread while the model computes.

A mask is a row of bits over the vocabulary. A row that draws behind drafted tokens has the mask
after these. Where a mask has one token, what must follow is looked up, and becomes a draft of the
next step.
"""

from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from torch import Tensor

from services.worker.engine.sampling.grammars import Grammars
from services.worker.engine.sampling.token_masks import Mask
from services.worker.kernels.interface import SamplingKernels
from services.worker.requests.types.batch import Ints, StepBatch
from services.worker.requests.types.grammar import GrammarMatcher, Words, cannot_continue
from services.worker.requests.types.sequence import Sequence

ALL_TOKENS = -1  # a word that allows all of its tokens
FULL_WORD = 2**32 - 1
NOTHING_ALLOWED = cannot_continue("no token that the request allows may come next")


Drafts = dict[Sequence, tuple[range, Seq[int]]]  # of a request: rows of logits, and drafted tokens
Compiled = dict[Sequence, "Future[LLMatcher]"]  # grammars of requests without a matcher


class Constrained(NamedTuple):
    """A request of a step with a grammar: the row of logits of its next token, and the output
    tokens that its matcher has not consumed."""

    sequence: Sequence
    row: int
    unread: Seq[int]


@dataclass(frozen=True, slots=True)
class FilledMasks:
    """The masks `words` [masked, words] of the `rows` [masked] of logits, and the requests that
    cannot continue, with a sentence for each: what they draw does not count."""

    rows: Ints
    words: Words
    failed: list[tuple[Sequence, str]]


@dataclass(frozen=True, slots=True)
class GrammarMask(Mask):
    """The `rows` [masked] draw only tokens with a bit in `words` [masked, words]."""

    rows: Tensor
    words: Tensor
    kernels: SamplingKernels

    def change(self, logits: Tensor, positions: Tensor) -> None:
        self.kernels.mask_tokens(logits, self.rows, self.words)


class GrammarMasks:
    """Fills the masks of one step at a time."""

    def __init__(self, grammars: Grammars, threads: int):
        """`threads` compute masks. One thread needs no hand-over, which takes longer than most
        masks of a small vocabulary."""
        self._grammars = grammars
        self._threads = threads
        self._executor: LLExecutor | None = None  # of several threads, once there is a grammar
        self._thread = ThreadPoolExecutor(1, "grammar-masks")

    def begin(self, batch: StepBatch) -> "Future[FilledMasks] | None":
        """Begins to fill the masks of a step, with every token known; None if no row follows a
        grammar. An ended member of a static batch draws without a mask: its tokens do not count."""
        asked = [
            Constrained(sequence, row, _unread(sequence))
            for row, sequence in enumerate(batch.sampling)
            if sequence.constrained and not sequence.ended
        ]
        if not asked:
            return None
        compiled = {
            sequence: self._grammars.compile(sequence.prompt.sampling.grammar)
            for sequence, *_ in asked
            if sequence.matcher is None
        }
        return self._thread.submit(self._fill_or_raise, asked, compiled, _constrained_drafts(batch))

    def _fill_or_raise(
        self, asked: list[Constrained], compiled: Compiled, drafts: Drafts
    ) -> FilledMasks:
        """As `_fill`. Raises RuntimeError for any defect of llguidance, so that the step fails, and
        in the end only the request at fault."""
        try:
            return self._fill(asked, compiled, drafts)
        except BaseException as error:  # a panic in Rust is no Exception
            raise RuntimeError("llguidance failed to fill the masks of a step") from error

    def _fill(self, asked: list[Constrained], compiled: Compiled, drafts: Drafts) -> FilledMasks:
        """The masks of next tokens, then those behind drafts."""
        matchers = [self._advance(each, compiled) for each in asked]
        rows = [each.row for each in asked]
        rows += [row for behind, _ in drafts.values() for row in behind]
        words = np.full((len(rows), self._grammars.words), ALL_TOKENS, np.int32)
        self._fill_first(matchers, words)
        self._fill_behind(drafts, words[len(asked) :])
        failed: list[tuple[Sequence, str]] = []
        for place, count in enumerate(np.count_nonzero(words[: len(asked)], -1).tolist()):
            matcher = matchers[place]
            if why := matcher.error or ("" if count else NOTHING_ALLOWED):
                words[place] = ALL_TOKENS
                failed.append((asked[place].sequence, why))
            elif count == 1 and _has_one_bit(words[place]):
                matcher.find_forced()
        return FilledMasks(np.array(rows, np.int64), words, failed)

    def _advance(self, asked: Constrained, compiled: Compiled) -> GrammarMatcher:
        """The request's matcher, after all known tokens of its answer."""
        sequence = asked.sequence
        if sequence.matcher is None:
            allowed = self._grammars.allowed_words(sequence.prompt.sampling.allowed_token_ids)
            copied = compiled[sequence].result().deep_copy()
            sequence.matcher = GrammarMatcher(copied, allowed)
        sequence.matcher.consume(asked.unread)
        return sequence.matcher

    def _fill_first(self, matchers: Seq[GrammarMatcher], words: Words) -> None:
        """Fills the masks of the next tokens."""
        if self._threads == 1:
            start, size = words.ctypes.data, words.strides[0]
            for place, each in enumerate(matchers):
                each.matcher.unsafe_compute_mask_ptr(start + place * size, size)
        else:
            self._executor = self._executor or LLExecutor(self._threads)
            places = [(each.matcher, place) for place, each in enumerate(matchers)]
            fill_next_token_bitmask_par(self._executor, places, words)
        for place, each in enumerate(matchers):
            each.read_error()
            if each.allowed is not None:
                words[place] &= each.allowed

    def _fill_behind(self, drafts: Drafts, words: Words) -> None:
        """Fills the masks behind the drafts of each request, up to the first draft that its grammar
        does not allow, or that ends the answer: no token behind that counts."""
        first = 0
        for sequence, (_, tokens) in drafts.items():
            assert sequence.matcher is not None, "a request with drafts was advanced"
            matcher, consumed = sequence.matcher.matcher, 0
            for token in tokens:
                if token in self._grammars.eos_ids or not matcher.try_consume_tokens([token]):
                    break
                fill_next_token_bitmask(matcher, words, first + consumed)
                consumed += 1
            if consumed:
                matcher.rollback(consumed)
            sequence.matcher.read_error()
            first += len(tokens)


def _unread(sequence: Sequence) -> Seq[int]:
    consumed = sequence.matcher.consumed if sequence.matcher else 0
    return sequence.tokens[sequence.prompt_tokens + consumed :]


def _constrained_drafts(batch: StepBatch) -> Drafts:
    """The drafts of requests with a grammar. Rows behind drafts follow all others that draw."""
    drafts: Drafts = {}
    if drafted := batch.drafted:
        first = len(batch.sampling)
        for chunk in drafted:
            rows = range(first, first + len(chunk.drafts))
            if chunk.sequence.constrained:
                drafts[chunk.sequence] = rows, chunk.drafts
            first = rows.stop
    return drafts


def _has_one_bit(words: Words) -> bool:
    """Whether a mask with one word that is not 0 allows one token."""
    word = int(words[words.nonzero()[0][0]]) & FULL_WORD
    return word.bit_count() == 1

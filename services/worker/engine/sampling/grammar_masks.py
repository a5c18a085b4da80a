"""GrammarMasks: the tokens that grammars allow next, filled in a thread while the model computes.

A mask is a row of bits over the vocabulary. A row that draws behind drafted tokens has the mask
after these. Where a mask has one token, what must follow is looked up, and becomes a draft of the
next step.
"""

from collections.abc import Iterator
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


class Constrained(NamedTuple):
    """A request of a step with a grammar: the row of logits of its next token, those behind its
    `drafts`, and the output tokens that its matcher has not consumed. Without a matcher, the
    grammar is `compiled`."""

    sequence: Sequence
    compiled: "Future[LLMatcher] | None"
    unread: Seq[int]
    rows: list[int]
    drafts: Seq[int]


@dataclass(frozen=True, slots=True)
class FilledMasks:
    """The masks `words` [masked, words] of the `rows` [masked] of logits, and the requests that
    cannot continue, with a sentence for each. Rows of these have masks that allow everything."""

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
        if not batch.constrained:
            return None
        return self._thread.submit(self._fill, list(self._collect(batch)))

    def _collect(self, batch: StepBatch) -> Iterator[Constrained]:
        sampling = batch.sampling
        behind: dict[Sequence, tuple[list[int], Seq[int]]] = {}  # rows of drafts, and the drafts
        first = len(sampling)
        for chunk in batch.drafted:
            rows = range(first, first + len(chunk.drafts))
            behind[chunk.sequence] = list(rows), chunk.drafts
            first = rows.stop
        for row, sequence in enumerate(sampling):
            if sequence.constrained and not sequence.ended:
                rows_behind, drafts = behind.get(sequence, ([], ()))
                compiled = None
                if sequence.matcher is None:
                    compiled = self._grammars.compile(sequence.prompt.sampling.grammar)
                yield Constrained(
                    sequence, compiled, _unread(sequence), [row, *rows_behind], drafts
                )

    def _fill(self, requests: list[Constrained]) -> FilledMasks:
        matchers = [self._advance(request) for request in requests]
        rows = np.array([row for request in requests for row in request.rows], np.int64)
        words = np.full((len(rows), self._grammars.words), ALL_TOKENS, np.int32)
        firsts = np.cumsum([0, *(len(request.rows) for request in requests)])[:-1].tolist()
        self._fill_first(matchers, firsts, words)
        for request, matcher, first in zip(requests, matchers, firsts, strict=True):
            if request.drafts and not matcher.error:
                self._fill_behind(matcher, request.drafts, words[first:])
            if matcher.allowed is not None:
                words[first : first + len(request.rows)] &= matcher.allowed
        counts = np.count_nonzero(words[firsts], -1)
        for place in np.flatnonzero(counts == 1).tolist():
            if _has_one_bit(words[firsts[place]]):
                matchers[place].find_forced()
        failed: list[tuple[Sequence, str]] = []
        for request, matcher, first, count in zip(
            requests, matchers, firsts, counts.tolist(), strict=True
        ):
            if why := matcher.error or ("" if count else NOTHING_ALLOWED):
                words[first : first + len(request.rows)] = ALL_TOKENS
                failed.append((request.sequence, why))
        return FilledMasks(rows, words, failed)

    def _advance(self, request: Constrained) -> GrammarMatcher:
        """The request's matcher, after all known tokens of its answer."""
        sequence = request.sequence
        matcher = sequence.matcher
        if matcher is None:
            assert request.compiled is not None, "a request without a matcher has its grammar"
            allowed = self._grammars.allowed_words(sequence.prompt.sampling.allowed_token_ids)
            matcher = GrammarMatcher(request.compiled.result().deep_copy(), allowed)
            sequence.matcher = matcher
        matcher.consume(request.unread)
        return matcher

    def _fill_first(self, matchers: Seq[GrammarMatcher], places: list[int], words: Words) -> None:
        """Fills the masks of the next tokens, at their places of `words`."""
        valid = [
            (each.matcher, place)
            for each, place in zip(matchers, places, strict=True)
            if not each.error
        ]
        if self._threads == 1:
            for matcher, place in valid:
                fill_next_token_bitmask(matcher, words, place)
        elif valid:
            self._executor = self._executor or LLExecutor(self._threads)
            fill_next_token_bitmask_par(self._executor, valid, words)
        for each in matchers:
            each.read_error()

    def _fill_behind(self, matcher: GrammarMatcher, drafts: Seq[int], words: Words) -> None:
        """Fills words[1:] with the masks behind the drafts, up to the first draft that the grammar
        does not allow, or that ends the answer: no token behind it counts."""
        inner, consumed = matcher.matcher, 0
        for token in drafts:
            if token in self._grammars.eos_ids or not inner.try_consume_tokens([token]):
                break
            consumed += 1
            fill_next_token_bitmask(inner, words, consumed)
        if consumed:
            inner.rollback(consumed)
        matcher.read_error()


def _unread(sequence: Sequence) -> Seq[int]:
    consumed = sequence.matcher.consumed if sequence.matcher else 0
    return sequence.tokens[sequence.prompt_tokens + consumed :]


def _has_one_bit(words: Words) -> bool:
    """Whether a mask with one word that is not 0 allows one token."""
    word = int(words[words.nonzero()[0][0]]) & FULL_WORD
    return word.bit_count() == 1

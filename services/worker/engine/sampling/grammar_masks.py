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
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)
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
    """Fills the masks of one step at a time.

    llguidance handles all requests of a step in one call, without Python's lock: after a call for
    each, this thread and the engine's would wait for each other, 64 times in a step of 64 requests.
    """

    def __init__(self, grammars: Grammars, threads: int):
        """`threads` compute masks."""
        self._grammars = grammars
        self._threads = threads
        self._executor: LLExecutor | None = None  # once there is a grammar
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
            for sequence, *_ in asked:  # what its matcher has consumed is unknown
                sequence.matcher = None
            raise RuntimeError("llguidance failed to fill the masks of a step") from error

    def _fill(self, asked: list[Constrained], compiled: Compiled, drafts: Drafts) -> FilledMasks:
        """The masks of each request: of its next token, then behind its drafts, up to the first
        draft that its grammar does not allow, or that ends the answer: no token behind counts."""
        executor = self._executor = self._executor or LLExecutor(self._threads)
        matchers = [self._matcher_for(each.sequence, compiled) for each in asked]
        _consume(executor, matchers, asked)
        rows, places = list[int](), list[int]()
        plain, drafted = list[tuple[LLMatcher, int]](), list[tuple[LLMatcher, int, list[int]]]()
        for (sequence, row, _), matcher in zip(asked, matchers, strict=True):
            place = len(rows)
            places.append(place)
            rows.append(row)
            if sequence in drafts:
                behind, tokens = drafts[sequence]
                rows += behind
                drafted.append((matcher.matcher, place, list(tokens)))
            else:
                plain.append((matcher.matcher, place))
        words = np.full((len(rows), self._grammars.words), ALL_TOKENS, np.int32)
        if plain:
            fill_next_token_bitmask_par(executor, plain, words)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(executor, drafted, words)
        failed = _examine(asked, matchers, words, places)
        return FilledMasks(np.array(rows, np.int64), words, failed)

    def _matcher_for(self, sequence: Sequence, compiled: Compiled) -> GrammarMatcher:
        if sequence.matcher is None:
            allowed = self._grammars.allowed_words(sequence.prompt.sampling.allowed_token_ids)
            copied = compiled[sequence].result().deep_copy()
            sequence.matcher = GrammarMatcher(copied, allowed)
        return sequence.matcher


def _consume(executor: LLExecutor, matchers: Seq[GrammarMatcher], asked: Seq[Constrained]) -> None:
    """Advances each request's matcher by the known tokens of its answer: one for most requests."""
    single = list[tuple[LLMatcher, int]]()
    for matcher, (_, _, unread) in zip(matchers, asked, strict=True):
        matcher.note(unread)
        if len(unread) == 1:
            single.append((matcher.matcher, unread[0]))
        elif unread:
            matcher.matcher.consume_tokens(list(unread))
    if single:
        executor.consume_token_par(single)


def _examine(
    asked: Seq[Constrained], matchers: Seq[GrammarMatcher], words: Words, places: Seq[int]
) -> list[tuple[Sequence, str]]:
    """The requests that cannot continue, with a sentence for each: their masks, at `places`, become
    open. Looks up what follows where such a mask has one token."""
    failed: list[tuple[Sequence, str]] = []
    for place, matcher in zip(places, matchers, strict=True):
        matcher.read_error()
        if matcher.allowed is not None:
            words[place] &= matcher.allowed
    filled = np.count_nonzero(words, -1).tolist()
    sums = words.sum(-1, dtype=np.int64).tolist()  # with one word that is not 0: that word
    for (sequence, *_), place, matcher in zip(asked, places, matchers, strict=True):
        if why := matcher.error or ("" if filled[place] else NOTHING_ALLOWED):
            words[place] = ALL_TOKENS
            failed.append((sequence, why))
        elif filled[place] == 1 and (sums[place] & FULL_WORD).bit_count() == 1:
            matcher.find_forced()
    return failed


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

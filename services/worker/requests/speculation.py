"""Speculation: drafts that a step verifies together with its decodes, and what became of them.

Drafts come from a request's own text (lookup.py), and from its grammar, where that allows one
continuation only.

A decode row with a draft computes its newest token and the drafted ones, as a prefill chunk does,
and a token is drawn at every position. Each is a pure function of (seed, position, logits), so that
the drawn tokens are those of single steps as long as they equal the draft; the first that differs
is the last one that counts. KV of the rest is overwritten by the next step.

Drafts take only what a step has left: room for tokens, and blank blocks, which are given back if
they are not used. A draft therefore evicts nothing, and afterwards memory is as without drafts.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from services.worker.kv.blocks import BlockPool
from services.worker.requests.types.batch import PrefillChunk, StepBatch
from services.worker.requests.types.limits import Counters
from services.worker.requests.types.lookup import DraftLimits, PromptLookup
from services.worker.requests.types.prompt import SamplingParams
from services.worker.requests.types.sequence import Sequence

WEIGHT = 1 / 32  # of a step in the mean of tokens per step
# Drafted tokens per row of a step from which they can outweigh its composition: measured on a CPU,
# a step of 32 rows takes a tenth longer if any of them has a draft.
LEAST_SHARE = 1 / 8


def may_draft(sampling: SamplingParams) -> bool:
    """Whether the tokens of a request can be drawn at several positions at once. Penalties and bad
    tokens depend on the tokens drawn before, which are known only afterwards; with a grammar and
    allowed tokens, a position may have no token that can be drawn."""
    stuck = sampling.grammar and sampling.allowed_token_ids
    return not (sampling.penalized or sampling.bad_tokens or stuck)


class Speculation:
    """Drafts for decoding requests. `tokens_per_step` is the mean number of tokens that a request
    gets by a decode step, 1 without drafts."""

    def __init__(self, limits: DraftLimits, pool: BlockPool, counters: Counters):
        self._limits = limits
        self._pool = pool
        self._counters = counters
        self.tokens_per_step = 1.0
        self._drafts = limits.most > 0  # or a grammar has made a draft

    def find(self, decodes: Seq[Sequence]) -> list[tuple[Sequence, list[int]]]:
        """Drafts for some of the requests that decode in a step and have memory for more than their
        next token; none if they are few beside its rows, because a step with drafts is composed
        anew. O(requests)."""
        drafting = decodes
        if not self._limits.most:  # only grammars make drafts; most requests have none
            drafting = [s for s in decodes if s.matcher is not None and s.matcher.forced]
        proposed = ((s, self._propose(s)) for s in drafting if self._slots(s) > 0)
        found = [(sequence, tokens) for sequence, tokens in proposed if tokens]
        drafted = sum(len(tokens) for _, tokens in found)
        return found if drafted >= LEAST_SHARE * len(decodes) else []

    def draft(self, decodes: Seq[Sequence], room: int) -> list[PrefillChunk]:
        """Decodes with a draft and memory for it, of at most `room` drafted tokens. The newest
        tokens have memory already. O(requests)."""
        drafted: list[PrefillChunk] = []
        for sequence, tokens in self.find(decodes):
            fitting = tokens[: max(0, min(room, self._slots(sequence)))]
            if fitting:
                drafted.append(self._chunk(sequence, fitting))
                room -= len(fitting)
        return drafted

    def record(self, batch: StepBatch, accepted: Iterable[int]) -> None:
        """Records how many tokens of each draft of a step were accepted."""
        self._drafts = self._drafts or bool(batch.drafted)
        if not self._drafts:
            return
        counters, gained = self._counters, 0
        for chunk, count in zip(batch.drafted, accepted, strict=True):
            counters.drafts += 1
            counters.draft_tokens += len(chunk.drafts)
            counters.accepted_tokens += count
            gained += count
            if chunk.sequence.lookup is not None:
                chunk.sequence.lookup.record(len(chunk.drafts), count)
        if rows := batch.decoding:
            self.tokens_per_step += WEIGHT * (1 + gained / rows - self.tokens_per_step)

    def release(self, drafted: Iterable[PrefillChunk]) -> None:
        """Gives back the blocks that the drafts of a computed or failed step did not need."""
        for chunk in drafted:
            sequence = chunk.sequence
            if sequence.computed:
                self._pool.trim(sequence.request_id, sequence.computed)

    def _slots(self, sequence: Sequence) -> int:
        """How many drafted tokens fit into its blocks and the blank ones."""
        blocks = len(self._pool.table(sequence.request_id)) + self._pool.blank_blocks
        return blocks * self._pool.block_tokens - len(sequence.tokens)

    def _propose(self, sequence: Sequence) -> list[int]:
        """A draft that leaves a token of the budget to be drawn after it."""
        tokens = sequence.tokens
        most = min(sequence.limit_length, sequence.max_length) - len(tokens) - 1
        lookup, matcher = sequence.lookup, sequence.matcher
        if lookup is None and not may_draft(sequence.prompt.sampling):
            return []
        if matcher is not None and (forced := matcher.continuation(tokens, sequence.prompt_tokens)):
            return forced[: max(0, most)]
        if not self._limits.most:
            return []
        if lookup is None:
            lookup = sequence.lookup = PromptLookup(self._limits)
        return lookup.propose(tokens, most)

    def _chunk(self, sequence: Sequence, drafts: list[int]) -> PrefillChunk:
        end = len(sequence.tokens) + len(drafts)
        self._pool.grow(sequence.request_id, end)
        table = np.array(self._pool.table(sequence.request_id), np.int64)
        return PrefillChunk(sequence, sequence.computed, end, table, tuple(drafts))

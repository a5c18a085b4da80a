"""Sampler: draws one token per row of logits, as a pure function of (seed, position, logits). The
rest of the batch has no effect.

A sequence that was evicted, moved or resumed therefore draws the same tokens. The order of filters
is: masks by token id, penalties, temperature, top_k, top_p among the tokens that top_k kept, min_p
relative to the most likely token. Nothing here waits for the device, and the host need not know the
tokens drawn before.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from services.worker.engine.sampling.draw_plan import NOTHING, DrawPlan, Planner
from services.worker.engine.sampling.drawn import DrawnTokens
from services.worker.engine.sampling.grammar_masks import FilledMasks, GrammarMask
from services.worker.engine.sampling.seen_tokens import SeenTokens
from services.worker.engine.sampling.token_masks import Mask
from services.worker.kernels.interface import SamplingKernels
from services.worker.kv.device_streams import Streams, to_device
from services.worker.requests.types.batch import Ints
from services.worker.requests.types.prompt import SamplingParams
from services.worker.requests.types.sequence import Sequence


def is_plain(sampling: SamplingParams) -> bool:
    """Whether each token of a request is a plain argmax."""
    return (
        sampling.temperature == 0
        and not sampling.penalized
        and sampling.logprobs is None
        and not sampling.min_tokens
        and not sampling.masked
        and not sampling.grammar
    )


class Sampler:
    """Draws the tokens of one model's batches. Not thread-safe."""

    def __init__(
        self,
        device: torch.device,
        vocab_size: int,
        eos_ids: Iterable[int],
        kernels: SamplingKernels,
        streams: Streams,
    ):
        self.seen = SeenTokens(device, vocab_size)
        self._device = device
        ends = [token for token in eos_ids if token < vocab_size]
        self._planner = Planner(device, ends, self.seen)
        self._kernels = kernels
        self._streams = streams
        self._plain: list[Sequence] = []  # the last batch with only plain rows
        self._plan: DrawPlan | None = None  # of the last batch with other rows
        self._newest = NOTHING  # tokens of the last step

    def clear(self) -> None:
        """Drops all requests."""
        self._plain, self._plan, self._newest = [], None, NOTHING
        self._planner.clear()
        self.seen.clear()

    @torch.inference_mode()
    def draw(
        self,
        sequences: list[Sequence],
        logits: Tensor,
        ahead: Ints | None = None,
        filled: FilledMasks | None = None,
    ) -> DrawnTokens:
        """Draws a token for each of `sequences` from its row of `logits` [rows, vocabulary], which
        are not modified. The token counts as seen at once: the next step may be drawn before the
        host has it, and `tokens` of its sequence then ends with a negative placeholder. A sequence
        may have several rows, which draw `ahead` [rows] tokens after its next one, if nothing that
        it asks for depends on the tokens in between. `filled` are the masks of rows that follow a
        grammar. Raises ValueError if a placeholder's token was not drawn here."""
        if self._is_plain(sequences):
            self._newest = self._kernels.argmax(logits)
            return DrawnTokens(self._newest, self._streams)
        plan = self._plan_for(sequences, ahead)
        # If an error occurs below, the device may be ahead of the plan by a part of a step.
        self._plan = None
        tokens = self._draw(plan, logits, self._grammar_masks(filled))
        logprobs = plan.logprob_rows.gather(logits, tokens) if plan.logprob_rows else []
        plan.advance(tokens)
        self._plan, self._newest = plan, tokens
        return DrawnTokens(tokens, self._streams, plan.logprob_rows, logprobs)

    def _is_plain(self, sequences: list[Sequence]) -> bool:
        if sequences == self._plain:
            return True
        if not all(is_plain(sequence.prompt.sampling) for sequence in sequences):
            return False
        self._plain = list(sequences)
        return True

    def _plan_for(self, sequences: list[Sequence], ahead: Ints | None) -> DrawPlan:
        """The last plan, if the same sequences continue from it."""
        lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
        if ahead is not None:
            lengths += ahead
        if self._plan is not None and self._plan.suits(sequences, lengths):
            return self._plan
        return self._planner.plan(sequences, lengths, self._newest)

    def _grammar_masks(self, filled: FilledMasks | None) -> list[Mask]:
        if filled is None:
            return []
        rows, words = to_device(filled.rows, self._device), to_device(filled.words, self._device)
        return [GrammarMask(rows, words, self._kernels)]

    def _draw(self, plan: DrawPlan, logits: Tensor, grammars: list[Mask]) -> Tensor:
        given, masks = logits, plan.masks + grammars
        logits = logits.float()
        if logits is given and (plan.penalized or masks):
            logits = logits.clone()
        for mask in masks:
            mask.change(logits, plan.positions)
        penalized = plan.penalized
        ids = times = NOTHING
        if penalized:
            ids, times = self.seen.read(penalized.seen, penalized.seen_index)
            penalized.change(logits, ids, times)
        tokens = self._choose(plan, logits)
        if penalized:
            drawn = penalized.rows.select(tokens)
            self.seen.count(penalized.seen, penalized.seen_index, ids, times, drawn)
        return tokens

    def _choose(self, plan: DrawPlan, logits: Tensor) -> Tensor:
        """Greedy rows first, then the others overwrite theirs."""
        if plan.greedy:
            tokens = self._kernels.argmax(logits)
        else:
            tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        if not plan.random:
            return tokens
        uniform = plan.uniform()
        for group in plan.random:
            drawn = group.draw(logits, uniform, self._kernels)
            if group.rows.index is None:
                return drawn
            tokens.index_copy_(0, group.rows.index, drawn)
        return tokens

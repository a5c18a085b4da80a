"""Grammars of answers in vLLM: foretoken's matchers give the masks that vLLM applies.

vLLM's own structured output cannot begin in the middle of an answer. A matcher here follows from
the tokens that the answer has, so that a request continues after a pause or at another worker as in
foretoken's own engine. vLLM is given the compiled grammar, and none of its backends compiles one.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.request import StructuredOutputRequest

from services.worker.engine.sampling.grammars import WORD_BITS, Grammars
from services.worker.requests.types.grammar import Words, cannot_continue
from services.worker.requests.types.prompt import Prompt, SamplingParams

ALL_TOKENS = -1  # a word that allows all of its tokens
ALL_WORD = np.uint32(2**32 - 1)  # the same


class AnswerGrammar(StructuredOutputGrammar):
    """The place of one request's answer in its grammar, as vLLM asks for it.

    `min_tokens` and bad tokens are masked here, because vLLM would mask the only tokens that a
    grammar allows: they give way to it.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        sampling: SamplingParams,
        eos_ids: Collection[int],
        allowed: Words | None,
        output: Sequence[int] = (),
    ):
        """`matcher` is at the beginning of the grammar, `output` is the answer so far, `allowed`
        [words] are the tokens that the request allows at all; None: any."""
        self._matcher, self._sampling, self._eos_ids = matcher, sampling, eos_ids
        self._allowed = None if allowed is None else allowed.view(np.uint32)
        self._ends = {*sampling.stop_token_ids, *eos_ids}
        self._output: list[int] = []
        self._behind_end = 0  # tokens, from the end on; the matcher has not consumed them
        self.accept_tokens("", [*output])

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advances by drawn or drafted tokens. Returns whether the answer may have them."""
        for token in tokens:
            if self._behind_end or token in self._eos_ids:
                if not (self._behind_end or self._matcher.is_accepting()):
                    return False
                self._behind_end += 1
            elif not self._matcher.consume_token(token):
                return False
            self._output.append(token)
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Those of the drafted tokens that may follow."""
        if self._behind_end:
            return []
        return tokens[: self._matcher.validate_tokens(tokens)]

    def rollback(self, num_tokens: int) -> None:
        behind = min(num_tokens, self._behind_end)
        self._behind_end -= behind
        self._matcher.rollback(num_tokens - behind)
        del self._output[len(self._output) - num_tokens :]

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        words = bitmask[batch_index].numpy().view(np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():  # it accepts no token any more, which ends the request
            words[:] = ALL_WORD
            return
        if self._allowed is not None:
            words &= self._allowed
        if masked := self._find_masked():
            _mask_unless_last(words, masked)

    def is_terminated(self) -> bool:
        return self._behind_end > 0

    def reset(self) -> None:
        self._matcher.reset()
        self._output.clear()
        self._behind_end = 0

    def _find_masked(self) -> set[int]:
        """The tokens that may not come next, unless the grammar allows nothing else."""
        output, sampling = self._output, self._sampling
        masked = {
            bad[-1]
            for bad in sampling.bad_tokens
            if len(bad) == 1 or tuple(output[1 - len(bad) :]) == bad[:-1]
        }
        return masked | self._ends if len(output) < sampling.min_tokens else masked


def _mask_unless_last(words: NDArray[np.uint32], masked: Collection[int]) -> None:
    kept = words.copy()
    for token in masked:
        kept[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
    if kept.any():
        words[:] = kept


class MaskBackend(StructuredOutputBackend):
    """Allocates the masks of a step for vLLM."""

    def __init__(self, words: int):
        self._words = words

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.full((max_num_seqs, self._words), ALL_TOKENS, dtype=torch.int32)

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        raise NotImplementedError("requests of the worker have compiled grammars")

    def destroy(self) -> None:
        """Holds nothing."""


def find_grammar_refusal(grammars: Grammars, prompt: Prompt) -> str:
    """Why a prompt's answer so far cannot be continued within its grammar; empty if it can."""
    if fault := grammars.find_fault(prompt.sampling.grammar):
        return fault
    if not (prompt.sampling.grammar and prompt.delivered_tokens):
        return ""
    output = list(prompt.token_ids[prompt.prompt_tokens :])
    matcher = grammars.compile(prompt.sampling.grammar).result().deep_copy()
    if matcher.validate_tokens(output) == len(output):
        return ""
    return cannot_continue("its first tokens do not follow it")


def constrain(
    grammars: Grammars, sampling: SamplingParams, output: Sequence[int]
) -> StructuredOutputRequest:
    """What a request of vLLM has of its grammar, after the answer so far. Its
    grammar is compiled."""
    matcher = grammars.compile(sampling.grammar).result().deep_copy()
    allowed = grammars.allowed_words(sampling.allowed_token_ids)
    answer = AnswerGrammar(matcher, sampling, grammars.eos_ids, allowed, output)
    params = StructuredOutputsParams(grammar=sampling.grammar)
    return StructuredOutputRequest(params, answer, reasoning_ended=True)

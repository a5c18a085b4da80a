"""What work costs, as it was measured and as it is foretold: steps, swaps, and whole batches."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import ClassVar, TypeVar

import numpy as np

from services.forecast import Floats

Number = TypeVar("Number", float, Floats)  # one, or a column of them


class Direction(StrEnum):
    """Which way KV is copied between device and host memory."""

    OFFLOAD = "offload"
    UPLOAD = "upload"


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One engine iteration as measured: what ran and how long it took."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class SwapTiming:
    """One request's KV copied between device and host memory, as measured, quantizing included.

    `quantize_s` is the part that the device computes: gathering blocks and, where they rest as
    INT8, quantizing them, or back. The rest is the link's, beside which the model runs on.
    """

    direction: Direction
    tokens: int
    elapsed_s: float
    quantize_s: float = 0.0
    request_id: str = field(default="", compare=False)  # whose, where it was measured


@dataclass(frozen=True, slots=True)
class KVCosts:
    """Seconds a token of KV costs to make again, or to move; 0 where nothing was measured yet."""

    recompute_token_s: float = 0.0
    offload_token_s: float = 0.0
    upload_token_s: float = 0.0

    def recompute_s(self, tokens: int) -> float:
        return tokens * self.recompute_token_s

    def swap_s(self, tokens: int) -> float:
        """There and back."""
        return tokens * (self.offload_token_s + self.upload_token_s)


UNMEASURED_KV = KVCosts()


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """One static batch as served: its size, its padded prompt length, the most output that one of
    it got, and the time from its first step to its last (papers/004 §III-D)."""

    seqs: int
    length_tokens: int
    generated_tokens: int
    elapsed_s: float


@dataclass(frozen=True)
class Neighbours:
    """Batches as they were served, for who estimates another from those most like it.

    `rows` are sequences, length, generated tokens and seconds of each, one after the other, as
    they are sent. Raises ValueError for more than MOST batches, for one that can't be, and for a
    `k` that is no count.
    """

    MOST: ClassVar[int] = 256

    rows: tuple[float, ...] = ()
    k: int = 5  # how many are asked; papers/004 leaves it open, 5 is the usual

    def __post_init__(self) -> None:
        if len(self.rows) % 4 or len(self) > self.MOST or not 1 <= self.k <= self.MOST:
            raise ValueError(
                f"1 to {self.MOST} of at most {self.MOST} batches are asked, 4 numbers each"
            )
        if self.rows and not (np.isfinite(self.columns).all() and self.columns.min() >= 0):
            raise ValueError("a batch served has no size, length or time below zero or without end")

    @classmethod
    def of(cls, batches: Iterable[BatchTiming], k: int = 5) -> "Neighbours":
        served = ((b.seqs, b.length_tokens, b.generated_tokens, b.elapsed_s) for b in batches)
        return cls(tuple(float(number) for batch in served for number in batch), k)

    def __len__(self) -> int:
        return len(self.rows) // 4

    @cached_property
    def columns(self) -> Floats:
        """(4, batches): sequences, length, generated tokens, seconds."""
        return np.array(self.rows, float).reshape(-1, 4).T


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one packed engine step, linear in what runs in it, and of batches by likeness.

    The continuous-batching form of SCLS' estimator (papers/003 §4.2): with no padding the
    batch×length terms of Eq. 3-4 collapse into token counts. A static batch padded to L is N·L
    tokens, so that the same coefficients say both: p1 = prefill + context token, d1 = context
    token, d2 = sequence, p4 = d4 = base. p2, p3 and d3 are 0: no step here costs more for the
    number of prompts or for a length beyond the tokens they make.
    `error_p50` and `error_p90` are of a step, relative: out of sample over the latest
    `error_steps`, each told by the model as it was served before it was learnt from; where
    `error_steps` is 0, too few have come yet, and they are the fit's own over its `samples`.
    `offload_token_s` and `upload_token_s` are seconds a token of KV takes to host memory and
    back, 0 until a swap was measured, and `quantize_token_s` what the device computes of both
    together: gathering, quantizing where KV rests as INT8, and back. `neighbours` are what
    Magnus' estimator asks (papers/004).
    """

    base_s: float
    prefill_token_s: float
    decode_seq_s: float
    context_token_s: float
    version: int = 0
    source: str = "linear"
    error_p50: float = 0.0
    error_p90: float = 0.0
    samples: int = 0
    offload_token_s: float = 0.0
    upload_token_s: float = 0.0
    quantize_token_s: float = 0.0
    error_steps: int = 0
    neighbours: Neighbours = Neighbours()

    def step_s(self, prefill_tokens: float, decode_seqs: float, context_tokens: float) -> float:
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_seq_s * decode_seqs
            + self.context_token_s * context_tokens
        )

    def prefill_s(self, prompt_tokens: int) -> float:
        """A prompt alone in one step."""
        return self.step_s(prompt_tokens, 0, prompt_tokens)

    def serve_s(self, seqs: Number, length_tokens: Number, steps: Number) -> Number:
        """`seqs` prompts padded to that length prefilled together, then so many steps of them all.

        SCLS' T_serve (papers/003 Eq. 1-4) in closed form: the k-th step reads N·(L + k) tokens,
        whose sum over k = 1..S is N·(S·L + S·(S + 1)/2). O(1), or once for whole columns.
        """
        prompts = seqs * length_tokens
        prefill_s = self.base_s + (self.prefill_token_s + self.context_token_s) * prompts
        read = steps * prompts + seqs * steps * (steps + 1) / 2
        decode_s = steps * (self.base_s + self.decode_seq_s * seqs) + self.context_token_s * read
        return prefill_s + decode_s

    @property
    def kv_costs(self) -> KVCosts:
        return KVCosts(self.prefill_token_s, self.offload_token_s, self.upload_token_s)

    def decode_tokens_per_s(self, seqs: int, mean_context_tokens: float) -> float:
        """Tokens a second while `seqs` sequences decode together."""
        return seqs / max(1e-9, self.step_s(0, seqs, seqs * mean_context_tokens))

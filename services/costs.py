"""Costs of work, measured and modelled: steps, swaps, and whole batches."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import ClassVar, TypeVar

import numpy as np

from services.forecast import Floats

Number = TypeVar("Number", float, Floats)  # one number, or a column of them
MAX_S = 86_400.0  # of a step, a swap, a batch or a token; more would price all work beyond reason


def is_possible_s(measured_s: float) -> bool:
    """Whether a measured time can be true: it is not negative, above MAX_S or NaN."""
    return 0 <= measured_s <= MAX_S


class Direction(StrEnum):
    """The direction of KV copies between device and host memory."""

    OFFLOAD = "offload"
    UPLOAD = "upload"


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One measured engine iteration: what ran and how long it took."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class SwapTiming:
    """One measured KV copy of a request between device and host memory, including quantization.

    `quantize_s` is the device's part: gathering blocks and, for INT8 in host memory, quantizing
    them, or the reverse. The rest is the link's time, during which the model runs.
    """

    direction: Direction
    tokens: int
    elapsed_s: float
    quantize_s: float = 0.0
    request_id: str = field(default="", compare=False)  # the request, if known


@dataclass(frozen=True, slots=True)
class KVCosts:
    """Seconds per KV token to recompute or to move; 0 if not measured yet."""

    recompute_token_s: float = 0.0
    offload_token_s: float = 0.0
    upload_token_s: float = 0.0

    def recompute_s(self, tokens: int) -> float:
        return tokens * self.recompute_token_s

    def swap_s(self, tokens: int) -> float:
        """Round trip."""
        return tokens * (self.offload_token_s + self.upload_token_s)


UNMEASURED_KV = KVCosts()


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """One served static batch: its size, its padded prompt length, its longest output, and the time
    from its first step to its last (Magnus, Cheng et al., ICWS 2024, §III-D)."""

    seqs: int
    length_tokens: int
    generated_tokens: int
    elapsed_s: float


@dataclass(frozen=True)
class Neighbours:
    """Served batches, to estimate others from the most similar ones.

    `rows` are sequences, length, generated tokens and seconds of each, concatenated as in the
    message. Raises ValueError for more than MOST batches, for an impossible one, and for a `k`
    below 1.
    """

    MOST: ClassVar[int] = 256

    rows: tuple[float, ...] = ()
    k: int = 5  # neighbours of an estimate; Magnus leaves it open, 5 is usual

    def __post_init__(self) -> None:
        if len(self.rows) % 4 or len(self) > self.MOST or not 1 <= self.k <= self.MOST:
            raise ValueError(
                f"neighbours must be 4 numbers for each of at most {self.MOST} batches, and k 1 to "
                f"{self.MOST}, got {len(self.rows)} numbers and k = {self.k}"
            )
        if self.rows and not (np.isfinite(self.columns).all() and self.columns.min() >= 0):
            raise ValueError(
                "sizes, lengths and times of served batches must be finite and not negative"
            )

    @classmethod
    def fit(cls, batches: Iterable[BatchTiming], k: int = 5) -> "Neighbours":
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
    """Seconds of one packed engine step, linear in its contents, and of batches by similarity.

    The continuous-batching form of SCLS' estimator (Cheng et al., 2024, §4.2): without padding the
    batch×length terms of Eq. 3-4 become token counts. A static batch padded to L is N·L tokens, so
    the same coefficients describe both: p1 = prefill + context token, d1 = context token, d2 =
    sequence, p4 = d4 = base. p2, p3 and d3 are 0: no step costs extra for the number of prompts or
    for a length beyond its tokens. `error_p50` and `error_p90` are relative errors of a step: out
    of sample over the latest `error_steps`, each predicted by the model as served before it was
    learned from; if `error_steps` is 0, they are those of the fit over its `samples`.
    `offload_token_s` and `upload_token_s` are seconds per KV token to host memory and back, 0 until
    a swap was measured. `quantize_token_s` is the device's part of both together. `neighbours` are
    the data of Magnus' estimator. `tokens_per_step` are the tokens that a sequence gets by a decode
    step, as its worker measured: above 1 with speculation, where the time of a step includes the
    verified drafts.
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
    tokens_per_step: float = 1.0

    def step_s(self, prefill_tokens: float, decode_seqs: float, context_tokens: float) -> float:
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_seq_s * decode_seqs
            + self.context_token_s * context_tokens
        )

    def serve_s(self, seqs: Number, length_tokens: Number, steps: Number) -> Number:
        """Seconds of `seqs` prompts padded to this length, prefilled together, then this many steps
        of all.

        SCLS' T_serve (Eq. 1-4) in closed form: the k-th step reads N·(L + k) tokens; the sum
        over k = 1..S is N·(S·L + S·(S + 1)/2). O(1), or vectorised over columns.
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
        """Tokens per second while `seqs` sequences decode together."""
        step_s = self.step_s(0, seqs, seqs * mean_context_tokens)
        return seqs * self.tokens_per_step / max(1e-9, step_s)

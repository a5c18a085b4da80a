"""The nouns every part speaks: frozen values, no behaviour beyond their own arithmetic.

Seconds, tokens, bytes; the unit is the last word of a name. Times are readings of the owner's
monotonic clock and are never compared across processes.

GLOSSARY, one name for one thing everywhere:

  request    what a client asked for; a *job* is the scheduler's record of it, a *sequence* the
             worker's, a *session* the gateway's
  prompt, output, context   tokens given, tokens made, both together
  held       tokens in KV, on the device or at rest in host memory; `blocks` of the device alone
  cap        the most output a request may ever have (its max_tokens); `limit` what it may have made
             before it stops by itself (a *slice* beyond what is there)
  board      the scheduler's columns, a row a job; a *snapshot* is the board frozen for a round
  round      one decision: who runs next, where, for how many tokens, and why not the others
  order      ranks everybody; a *key* ascends by urgency, the *line* of a worker is that order with
             those who run moved ahead of whoever may not take their place
  contest    those who run or could; a *share* is one worker's part of the decision about them
  preempt    to stop one who runs: *paused* by a plan, *evicted* by its worker; it then *rests*
             where its KV does, and is *resumed*
  adopt      to take over a request that a worker has from before
  home       the worker that has a request's tokens; who rests is *moved* when another is to have it
  tenant     whose a request is: its cache salt, or else its user
  prefix     a text's first full blocks, each named by a *hash* of all up to its end
  forecast   a distribution over a request's output tokens, conditioned on what is there
  TTFT, TPOT, MTPOT   time to the first token, mean time per token after it, longest gap
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import inf
from typing import ClassVar, TypeVar

import numpy as np

from services.forecast import Floats, Forecast

Number = TypeVar("Number", float, Floats)  # one, or a column of them


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ERROR = "error"


class RejectReason(StrEnum):
    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"
    DRAINING = "draining"
    DUPLICATE = "duplicate"
    NO_MODEL = "no_model"
    TOO_LATE = "too_late"


class Residency(StrEnum):
    """Where a paused request's KV cache stays."""

    KEEP = "keep"
    OFFLOAD = "offload"
    DROP = "drop"


class Direction(StrEnum):
    """Which way KV is copied between device and host memory."""

    OFFLOAD = "offload"
    UPLOAD = "upload"


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now: nothing is wrong, the next event may change it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """No, with the sentence its user reads; `retry_after_s` 0 means do not retry."""

    reason: RejectReason
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sla:
    """Latency budgets; infinite where none was given."""

    name: str = "default"
    ttft_s: float = inf
    tpot_s: float = inf
    mtpot_s: float = inf


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to serve, as the control plane sees it: lengths and budgets, no text.

    `delivered_tokens` are output tokens its client already has; they count towards
    `max_tokens` and must be held in KV like the prompt. `worker_id` is where it is already, as
    its gateway knows it; empty for one that has been placed nowhere. `prefix_hashes` name the
    first blocks of its prompt where placing reads them; `tenant` is whose it is.
    """

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    application: str = ""
    delivered_tokens: int = 0
    deadline_s: float = inf
    sla: Sla = Sla()
    worker_id: str = ""
    prefix_hashes: tuple[int, ...] = ()
    tenant: str = ""


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


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What a worker said of itself when it attached."""

    worker_id: str
    address: str
    model: str
    kv_tokens: int
    block_tokens: int
    max_running: int
    max_context_tokens: int
    kv_bytes_per_token: int = 0
    host_tokens: int = 0  # KV tokens that host memory takes beside them

    @property
    def reach_tokens(self) -> int:
        """The longest prompt + output one request can have here."""
        return min(self.kv_tokens, self.max_context_tokens)


@dataclass(frozen=True, slots=True)
class Grant:
    """A budget: the request may hold `limit_tokens` output tokens in all, and stops there."""

    request_id: str
    limit_tokens: int


@dataclass(frozen=True, slots=True)
class Pause:
    request_id: str
    residency: Residency


@dataclass(frozen=True, slots=True)
class Standing:
    """A request as a plan ranks it; `wait_s` until it is expected to run, 0 while it does."""

    request_id: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """Requests that begin together, the shorter padded to the longest, and none of which leaves
    before all have ended or made what they may (papers/003 §2.2). Numbers, from 1 on, are never
    given twice by one scheduler."""

    number: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Absolute directives to one worker; requests not named go on as they were.

    Applying a plan twice changes nothing: a worker skips any `seq` it has seen.
    `victims` are evicted in this order, first to last, when memory runs out; running requests
    that it does not name are evicted after it, the newest admitted first.
    `order` ranks the requests that run or have KV there, most urgent first, for the worker's
    residency policy (`residency` names it; empty: recompute) to place their KV by, at `costs`.
    `batches` are made of requests that the same plan admits or extends.
    Where `prefix_blocks` is positive, reports say from now on which of the first so many blocks of
    texts are cached.
    """

    seq: int
    admit: tuple[Grant, ...] = ()
    extend: tuple[Grant, ...] = ()
    pause: tuple[Pause, ...] = ()
    prefetch: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()
    order: tuple[Standing, ...] = ()
    residency: str = ""
    costs: KVCosts = KVCosts()
    batches: tuple[StaticBatch, ...] = ()
    prefix_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    request_id: str
    output_tokens: int
    held_tokens: int
    blocks: int = 0  # of the device, shared ones included


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request that a worker has from before its scheduler, to be adopted."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    held_tokens: int
    limit_tokens: int
    running: bool
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    request_id: str
    output_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Report:
    """What happened at a worker since its last report. Applying one twice changes nothing.

    `evicted` hold the KV that rests in host memory, 0 tokens where it was dropped. `free_blocks`
    of the device are held by nobody; `shared_blocks` counts how often one is held beyond its
    first holder. `progress` names whoever holds other blocks than was last said of it, so that at
    each report the blocks last said of all who are here - `shared_blocks` + `free_blocks` are the
    device's; who finished or was cancelled by `applied_plan_seq` holds none. `prefixes_added` and
    `prefixes_gone` are hashes of blocks that can be shared by now, and can't any more, of those
    that a plan has asked for; bounded, the rest comes with the next report.
    """

    seq: int
    applied_plan_seq: int
    progress: tuple[Progress, ...] = ()
    finished: tuple[Completion, ...] = ()
    evicted: tuple[Progress, ...] = ()
    timings: tuple[StepTiming, ...] = ()
    swaps: tuple[SwapTiming, ...] = ()
    free_blocks: int = 0
    shared_blocks: int = 0
    prefixes_added: tuple[int, ...] = ()
    prefixes_gone: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished request, as something to learn from."""

    request_id: str
    model: str
    application: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    reason: FinishReason
    e2e_s: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One request in front of a batching policy. `forecast` is already cut at `max_tokens`
    by the arithmetic that reads it, not in itself."""

    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    forecast: Forecast

    @property
    def held_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

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
  replica    one copy of a model, a worker's; its *ranks* are the processes it runs over, of which
             rank 0 is the worker itself
  tenant     whose a request is: its cache salt, or else its user
  prefix     a text's first full blocks, each named by a *hash* of all up to its end
  forecast   a distribution over a request's output tokens, conditioned on what is there
  observability   what is told of all this to whoever looks on: metrics, logs, and a request's
             *trace*, made of *spans*
  TTFT, TPOT, MTPOT   time to the first token, mean time per token after it, longest gap
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from services.costs import UNMEASURED_KV, KVCosts, StepTiming, SwapTiming


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ERROR = "error"


class RejectReason(StrEnum):
    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"
    DUPLICATE = "duplicate"
    NO_MODEL = "no_model"
    TOO_LATE = "too_late"


class Residency(StrEnum):
    """Where a paused request's KV cache stays."""

    KEEP = "keep"
    OFFLOAD = "offload"
    DROP = "drop"


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
    first blocks of its prompt where placing reads them; `tenant` is whose it is. Where
    `include_forecast`, its client is told what is foreseen of it. Lower `priority` goes before
    higher, whatever the policy says within one.
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
    include_forecast: bool = False
    priority: int = 0


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
    start: str = ""  # what its start took, for people to read

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
class QueuePosition:
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
    order: tuple[QueuePosition, ...] = ()
    residency: str = ""
    costs: KVCosts = UNMEASURED_KV
    batches: tuple[StaticBatch, ...] = ()
    prefix_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RequestProgress:
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
    progress: tuple[RequestProgress, ...] = ()
    finished: tuple[Completion, ...] = ()
    evicted: tuple[RequestProgress, ...] = ()
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

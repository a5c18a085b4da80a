"""Value types that all services share. Frozen; the only behaviour is arithmetic on their fields.

Units are seconds, tokens and bytes; the unit ends the name. Times are readings of the owner's
monotonic clock and are never compared across processes.

CONTRIBUTING.md defines the terms.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

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
    """A refusal. `message` is shown to the user; `retry_after_s` 0 means do not retry."""

    reason: RejectReason
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sla:
    """Latency budgets; infinite where none is set."""

    name: str = "default"
    ttft_s: float = inf
    tpot_s: float = inf
    mtpot_s: float = inf


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to serve, as the control plane sees it: lengths and budgets, no text.

    `delivered_tokens` are output tokens that the client already has; they count towards
    `max_tokens` and must be in KV like the prompt. `worker_id` is the worker that holds the request
    according to its gateway, empty if none does. `prefix_hashes` name the first blocks of the
    prompt where the placement uses them. With `include_forecast`, forecasts are sent to the client.
    A lower `priority` runs first; the policy orders requests within one. The answer has at least
    `min_tokens`, which bounds its forecast. `key_name` is that of its API key, never the key.
    `adapter` is its LoRA adapter's name, empty for none. `weight`: of its tenant; 0: the
    scheduler's setting. `length_quantile`: of its forecast, for its gateway; 0: not sent.
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
    min_tokens: int = 0
    key_name: str = ""
    adapter: str = ""
    weight: float = 0.0
    length_quantile: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as it described itself when it attached."""

    worker_id: str
    address: str
    model: str
    kv_tokens: int
    block_tokens: int
    max_running: int
    max_context_tokens: int
    kv_bytes_per_token: int = 0
    host_tokens: int = 0  # KV tokens that fit into host memory as well
    start: str = ""  # durations of its start, for display
    placement: str = ""  # dtype and device of its model, for display
    max_batch_tokens: int = 0  # of a step; 0: unknown
    report_every_steps: int = 0  # between two reports of all running requests; 0: unknown
    adapter_slots: int = 0  # LoRA adapters on the device at a time; 0: no limit
    adapter_turn_steps: int = 0  # that one in use stays there while others wait
    epoch: int = 0  # ns: when its process began; 0: unknown

    @property
    def reach_tokens(self) -> int:
        """The longest prompt + output that one request can have on this worker."""
        return min(self.kv_tokens, self.max_context_tokens)


class Grant(NamedTuple):
    """A budget: the request stops at `limit_tokens` output tokens in all. A tuple, because a plan
    may have one for each running request."""

    request_id: str
    limit_tokens: int


class Pause(NamedTuple):
    """A tuple, as a Grant is."""

    request_id: str
    residency: Residency


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """Requests, the most urgent first, with the expected time until each runs, 0 while it runs.
    Two columns of one length, because a plan may rank thousands."""

    request_ids: tuple[str, ...] = ()
    wait_s: tuple[float, ...] = ()

    @staticmethod
    def of(pairs: Iterable[tuple[str, float]]) -> "QueueOrder":
        """The order of these requests with their waits."""
        return QueueOrder(*zip(*pairs, strict=True))

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return zip(self.request_ids, self.wait_s, strict=True)


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """Requests that start together, padded to the longest prompt; none leaves before all have
    finished or reached their limit (SCLS (Cheng et al., 2024), §2.2). A scheduler numbers its
    batches from 1 and never reuses a number."""

    number: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Absolute directives to one worker; requests that it does not name continue unchanged.

    Applying a plan twice changes nothing: a worker skips any `seq` it has seen.
    `victims` is the eviction order when memory runs out; running requests that it does not name
    are evicted after them, the newest admission first. `order` ranks the requests that run or have
    KV on the worker, most urgent first; the worker's residency policy (`residency`; empty:
    recompute) places their KV by it, at `costs`. `batches` consist of requests that the same plan
    admits or extends. If `prefix_blocks` is positive, later reports say which of the first
    `prefix_blocks` blocks of texts are cached.
    """

    seq: int
    admit: tuple[Grant, ...] = ()
    extend: tuple[Grant, ...] = ()
    pause: tuple[Pause, ...] = ()
    prefetch: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()
    order: QueueOrder = QueueOrder()
    residency: str = ""
    costs: KVCosts = UNMEASURED_KV
    batches: tuple[StaticBatch, ...] = ()
    prefix_blocks: int = 0


class RequestProgress(NamedTuple):
    """A tuple, because a report has one for each request."""

    request_id: str
    output_tokens: int
    held_tokens: int
    blocks: int = 0  # device blocks, including shared ones


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request that a worker has from an earlier Attach stream, to be adopted."""

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

    An `evicted` entry's held tokens are its KV in host memory, 0 if it was dropped. `progress` has
    every request with blocks that changed since they were last reported. `shared_blocks` counts the
    holders of device blocks beyond the first, so the last reported blocks of resident requests
    - `shared_blocks` + `free_blocks` are the device's blocks. Requests that finished or were
    cancelled by `applied_plan_seq` hold none. `prefixes_added` and `prefixes_gone` are hashes of
    those requested blocks that became or ceased to be shareable; each report carries a bounded
    number, and later reports carry the rest. `tokens_per_step` is the recent mean number of tokens
    that a request gets by a decode step, above 1 with speculation. `max_running` are the requests
    that may run at present, at most as many as the worker announced; 0: that many.
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
    tokens_per_step: float = 1.0
    max_running: int = 0


MAX_LIVE_ANSWERS = 16_384  # of one call to the predictor


@dataclass(frozen=True, slots=True)
class LiveAnswers:
    """Tokens generated so far by the answers of one application that have not ended."""

    model: str
    application: str
    output_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished request, as training data for forecasts. `key_name` and `reporter` say where it
    came from: the name of its API key, and the process that reported it."""

    request_id: str
    model: str
    application: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    reason: FinishReason
    e2e_s: float
    preemptions: int
    key_name: str = ""
    reporter: str = ""


Ending = Outcome | str  # of a request: its outcome, or its id if it ended without one

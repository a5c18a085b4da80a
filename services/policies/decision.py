"""The result of a round: what each worker runs next, and why other requests wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from services.forecast import Floats, Ints
from services.policies.memory import PolicyMemory
from services.policies.order.ranking import Ranking


class WaitReason(IntEnum):
    """Why a waiting request is or is not admitted; the keys of EXPLANATIONS."""

    ADMITTED = 0
    MEMORY = 1
    SLOTS = 2
    BLOCKED = 3
    NO_WORKER = 4
    IN_BATCH = 5
    STEP_BUDGET = 6
    ASSIGNED = 7
    CUT_SCHEDULED = 8
    CUT_ON_IDLE = 9
    ADAPTER_SLOTS = 10
    TOKEN_BUDGETS = 11


@dataclass(frozen=True)
class WaitExplanation:
    """The reason for one waiting request. Subclasses add up to two numbers as fields and the
    sentence that shows them."""

    reason: ClassVar[WaitReason]
    sentence: ClassVar[str]

    def __str__(self) -> str:
        return self.sentence.format(self)


@dataclass(frozen=True)
class Admitted(WaitExplanation):
    """`forecast_tokens` is the worker's forecast peak of KV tokens with this request."""

    reason = WaitReason.ADMITTED
    sentence = (
        "admitted: forecast peak {0.forecast_tokens:.0f} KV tokens of {0.plannable_tokens:.0f}"
    )
    forecast_tokens: float
    plannable_tokens: float


@dataclass(frozen=True)
class MemoryShort(WaitExplanation):
    reason = WaitReason.MEMORY
    sentence = "needs {0.needed_tokens:.0f} KV tokens in all, limit {0.plannable_tokens:.0f}"
    needed_tokens: float
    plannable_tokens: float


@dataclass(frozen=True)
class SlotsFull(WaitExplanation):
    reason = WaitReason.SLOTS
    sentence = "{0.running:.0f} requests run, the worker runs at most {0.max_running:.0f}"
    running: float
    max_running: float


@dataclass(frozen=True)
class BlockedInQueue(WaitExplanation):
    """A request ahead of it does not fit (head-of-line blocking)."""

    reason = WaitReason.BLOCKED
    sentence = "queue position {0.position:.0f}, behind a request that does not fit"
    position: float


@dataclass(frozen=True)
class NoWorker(WaitExplanation):
    """No worker with its model, its KV or enough context has a free slot."""

    reason = WaitReason.NO_WORKER
    sentence = "no worker that can run it has a free slot"


@dataclass(frozen=True)
class InBatch(WaitExplanation):
    """Its batch may go to any worker."""

    reason = WaitReason.IN_BATCH
    sentence = "in a batch of {0.batch_size:.0f}, {0.batches_ahead:.0f} batches ahead"
    batches_ahead: float
    batch_size: float


@dataclass(frozen=True)
class StepBudgetFull(WaitExplanation):
    """`needed_tokens` are the tokens that the next steps compute with this request."""

    reason = WaitReason.STEP_BUDGET
    sentence = "needs {0.needed_tokens:.0f} tokens per step, budget {0.budget_tokens:.0f}"
    needed_tokens: float
    budget_tokens: float


@dataclass(frozen=True)
class AssignedBatch(WaitExplanation):
    """Its batch waits for one worker."""

    reason = WaitReason.ASSIGNED
    sentence = "in a batch for worker {0.worker:.0f}, {0.batches_ahead:.0f} batches ahead"
    batches_ahead: float
    worker: float


@dataclass(frozen=True)
class CutScheduled(WaitExplanation):
    """The batch interval has not ended."""

    reason = WaitReason.CUT_SCHEDULED
    sentence = "waits {0.wait_s:.1f} s until the pool is cut into batches"
    wait_s: float


@dataclass(frozen=True)
class CutOnIdle(WaitExplanation):
    """The pool is cut when a worker finishes its batch."""

    reason = WaitReason.CUT_ON_IDLE
    sentence = "pool position {0.position:.0f}, waits for a worker to finish its batch"
    position: float


@dataclass(frozen=True)
class AdapterSlotsFull(WaitExplanation):
    """No worker that can run it has a slot for its LoRA adapter. `in_use` are the adapters of
    requests that run or have KV, `slots` those of all workers of its model."""

    reason = WaitReason.ADAPTER_SLOTS
    sentence = (
        "its adapter has no slot: adapters in use {0.in_use:.0f}, adapter slots of the workers "
        "{0.slots:.0f}"
    )
    in_use: float
    slots: float


@dataclass(frozen=True)
class TokenBudgetsFull(WaitExplanation):
    """In a larger batch, fewer tokens would be within the requests' budgets of the time per
    token."""

    reason = WaitReason.TOKEN_BUDGETS
    sentence = (
        "{0.running:.0f} requests run, the budgets of the time per token allow {0.slots:.0f} of "
        "this queue"
    )
    running: float
    slots: float


EXPLANATIONS = {kind.reason: kind for kind in WaitExplanation.__subclasses__()}


def explain(reason: int, first_value: float, second_value: float) -> WaitExplanation:
    """The explanation of a reason and its columns; a column without a field is ignored."""
    kind = EXPLANATIONS[WaitReason(reason)]
    return kind(*(first_value, second_value)[: len(fields(kind))])


_NO_ROWS = np.zeros(0, np.int64)
_NO_NUMBERS = np.zeros(0)


@dataclass(frozen=True)
class WaitExplanations:
    """Explanations of many requests in columns; `rows` are board rows. `first_values` and
    `second_values` are the fields of `EXPLANATIONS[reason]`, in their order; 0 where it has
    fewer."""

    rows: Ints = field(default_factory=_NO_ROWS.copy)
    reasons: Ints = field(default_factory=_NO_ROWS.copy)
    first_values: Floats = field(default_factory=_NO_NUMBERS.copy)
    second_values: Floats = field(default_factory=_NO_NUMBERS.copy)

    def select(self, mask: NDArray[np.bool_]) -> "WaitExplanations":
        return WaitExplanations(*(getattr(self, each.name)[mask] for each in fields(self)))

    @staticmethod
    def concatenate(parts: Sequence["WaitExplanations"]) -> "WaitExplanations":
        if not parts:
            return WaitExplanations()
        names = [each.name for each in fields(WaitExplanations)]
        return WaitExplanations(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))


@dataclass(frozen=True, slots=True)
class WorkerDecision:
    """What one worker runs next; the arrays hold board rows.

    `run` is in order of urgency; `limits`, parallel to it, is the total output at which each
    request stops. `pause` are running requests that do not run next; the preset's residency
    decides where their KV stays. `victims` is the eviction order when memory runs out. With
    `lockstep`, the newly admitted requests form a static batch: they start together, padded to the
    longest prompt, and none leaves before all have finished or reached their limit.
    """

    worker: int
    run: Ints
    limits: Ints
    pause: Ints
    victims: Ints
    peak_tokens: float = 0.0
    lockstep: bool = False


@dataclass(frozen=True)
class Decision:
    """The result of one round.

    `rows` and `serials` name the requests it considered. A row with another serial by the time the
    decision is applied belongs to a newer request and is left alone. Without events, the next
    round is due at `next_s`; events start one no earlier than `not_before_s`. `numbers` and
    `notes` (parallel to `rows`) are what the arrangement adds to `memory`.
    """

    round: int
    workers: tuple[WorkerDecision, ...] = ()
    explanations: WaitExplanations = field(default_factory=WaitExplanations)
    rows: Ints = field(default_factory=_NO_ROWS.copy)
    serials: Ints = field(default_factory=_NO_ROWS.copy)
    next_s: float = np.inf
    not_before_s: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Floats] = field(default_factory=dict)
    memory: PolicyMemory = field(default_factory=PolicyMemory)
    ranking: Ranking | None = None  # the order it follows; None before it is completed

"""How a choice ended, and why one was submitted again."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from services.core import FinishReason, Sla
from services.sla import RequestTimeline, SlaMissCause, judge_sla


@dataclass(frozen=True, slots=True)
class ChoiceOutcome:
    """The outcome of a choice after its complete delivery. The SLA is judged once, so that metrics,
    traces and stories agree."""

    sla: Sla
    timeline: RequestTimeline
    reason: FinishReason
    cause: SlaMissCause  # NONE if the SLA was met

    @classmethod
    def judged(cls, sla: Sla, timeline: RequestTimeline, reason: FinishReason) -> Self:
        return cls(sla, timeline, reason, judge_sla(sla, timeline, reason))


class ResubmitCause(StrEnum):
    """Why a request is submitted again."""

    SCHEDULER = "scheduler"  # the scheduler was lost before placement, or together with the worker
    WORKER = "worker"  # the worker's stream broke after the prompt was sent
    GAP = "gap"  # tokens before the received ones are missing
    LATE = "late"  # expected tokens did not arrive in time
    REASONING = "reasoning"  # not lost: its reasoning was ended, and the answer goes on behind it

    @property
    def confirmed(self) -> bool:
        """Whether the cause was observed rather than inferred."""
        return self in (ResubmitCause.SCHEDULER, ResubmitCause.WORKER, ResubmitCause.REASONING)

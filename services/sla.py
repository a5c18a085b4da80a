"""The timeline of a request, whether it met its SLA, and the stage that missed it. Pure.

The gateway judges by the tokens it receives; the scheduler's log replay judges by worker reports.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from services.core import FinishReason, Sla


class SlaMissCause(StrEnum):
    """The stage that missed the SLA; NONE if it was met."""

    NONE = ""
    REJECTED = "rejected"
    QUEUED = "queued"
    PREFILL = "prefill"
    PREEMPTED = "preempted"
    SWAP_IN = "swap-in"
    DECODE = "decode"
    CLIENT = "client"


@dataclass(slots=True)
class RequestTimeline:
    """Event times of one choice, on the owner's clock."""

    arrival_s: float
    placed_s: float = inf
    first_token_s: float = inf
    last_token_s: float = inf
    ended_s: float = inf
    tokens: int = 0
    longest_gap_s: float = 0.0
    preempted_gap_s: float = 0.0  # longest gap with a preemption inside
    preempted_s: float = 0.0  # total of gaps with a preemption inside
    swap_in_gap_s: float = 0.0  # part of that longest gap after readmission
    swap_in_s: float = 0.0  # the same over all such gaps; only where KV was kept
    away: bool = False  # preempted since the last token
    swap_in_since_s: float = inf  # when the current swap-in started
    rejected: bool = False
    gap_s: float | None = None  # gap before the latest tokens; None for the first

    def on_tokens(self, count: int, now_s: float, gaps: int = 1) -> None:
        """`count` tokens arrived at once, or over `gaps` equal gaps if only their end is known."""
        if not self.tokens:
            self.first_token_s = self.last_token_s = now_s
            self.tokens = count
            self.away, self.swap_in_since_s = False, inf
            return
        self.gap_s = gap_s = now_s - self.last_token_s
        self.last_token_s = now_s
        self.tokens += count
        if gaps > 1 and not self.away:
            gap_s /= gaps
        if gap_s > self.longest_gap_s:
            self.longest_gap_s = gap_s
        if self.away:
            self._on_back(gap_s, now_s)

    def on_preempted(self) -> None:
        """No token arrives until the request is placed or resumed."""
        self.away, self.swap_in_since_s = True, inf

    def on_resumed(self, kv_kept: bool, now_s: float) -> None:
        """Readmitted on its worker: its KV is swapped in or recomputed."""
        self.away, self.swap_in_since_s = True, now_s if kv_kept else inf

    def _on_back(self, gap_s: float, now_s: float) -> None:
        swap_in_s = max(0.0, now_s - self.swap_in_since_s)
        self.away, self.swap_in_since_s = False, inf
        self.preempted_s += gap_s
        self.swap_in_s += swap_in_s
        if gap_s > self.preempted_gap_s:
            self.preempted_gap_s, self.swap_in_gap_s = gap_s, swap_in_s

    @property
    def ttft_s(self) -> float:
        """Time to the first token, or to the end if there was none."""
        return min(self.first_token_s, self.ended_s) - self.arrival_s

    @property
    def queued_s(self) -> float:
        return min(self.placed_s, self.ended_s) - self.arrival_s

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return self.last_token_s - self.first_token_s if self.tokens else 0.0

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return self.decode_s / (self.tokens - 1) if self.tokens > 1 else 0.0


def judge_sla(sla: Sla, timeline: RequestTimeline, reason: FinishReason) -> SlaMissCause:
    """NONE when the SLA was met, else the stage that missed it first.

    A TTFT miss is attributed to the longer of queueing and prefill. A gap or TPOT miss is
    attributed to preemption if the budget would have held without it, and then to the longer of
    readmission and swap-in. A client that disconnects is CLIENT. A client that reads slowly is not:
    its socket cannot be told apart from a gateway that writes slowly.
    """
    if timeline.rejected:
        return SlaMissCause.REJECTED
    if timeline.ttft_s > sla.ttft_s:
        queued = timeline.queued_s * 2 >= timeline.ttft_s
        return SlaMissCause.QUEUED if queued else SlaMissCause.PREFILL
    if timeline.longest_gap_s > sla.mtpot_s:
        if timeline.preempted_gap_s > sla.mtpot_s:
            return _preemption_cause(timeline.swap_in_gap_s, timeline.preempted_gap_s)
        return SlaMissCause.DECODE
    if timeline.tpot_s > sla.tpot_s:
        unbroken_s = (timeline.decode_s - timeline.preempted_s) / max(1, timeline.tokens - 1)
        if unbroken_s <= sla.tpot_s:
            return _preemption_cause(timeline.swap_in_s, timeline.preempted_s)
        return SlaMissCause.DECODE
    return _ending_cause(timeline, reason)


def _preemption_cause(swap_in_s: float, away_s: float) -> SlaMissCause:
    return SlaMissCause.SWAP_IN if swap_in_s * 2 > away_s else SlaMissCause.PREEMPTED


def _ending_cause(timeline: RequestTimeline, reason: FinishReason) -> SlaMissCause:
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        return SlaMissCause.NONE
    if reason is FinishReason.CANCELLED:
        return SlaMissCause.CLIENT
    if timeline.tokens and timeline.away:
        swap_in_s = max(0.0, timeline.ended_s - timeline.swap_in_since_s)
        return _preemption_cause(swap_in_s, timeline.ended_s - timeline.last_token_s)
    if timeline.tokens:
        return SlaMissCause.DECODE
    return SlaMissCause.QUEUED if timeline.placed_s == inf else SlaMissCause.PREFILL


BECAUSE = {
    SlaMissCause.REJECTED: "it was rejected",
    SlaMissCause.QUEUED: "it waited too long in the queue",
    SlaMissCause.PREFILL: "its prefill took too long",
    SlaMissCause.PREEMPTED: "it was preempted for too long",
    SlaMissCause.SWAP_IN: "its KV took too long to swap in from host memory",
    SlaMissCause.DECODE: "decoding was too slow or did not finish",
    SlaMissCause.CLIENT: "its client disconnected",
}


def explain_sla(sla: Sla, timeline: RequestTimeline, reason: FinishReason) -> str:
    """The judgement as a sentence, with measured values and their budgets."""
    cause = judge_sla(sla, timeline, reason)
    missed = f"SLA {sla.name} missed ({cause}): {BECAUSE.get(cause, '')}"
    said = missed if cause else f"SLA {sla.name} met"
    if not timeline.tokens:
        return said
    parts = [("first token after", timeline.ttft_s, sla.ttft_s)]
    if timeline.tokens > 1:
        parts.append(("mean gap", timeline.tpot_s, sla.tpot_s))
        parts.append(("longest gap", timeline.longest_gap_s, sla.mtpot_s))
    measured = (
        f"{what} {took_s:.3f} s" + (f" of {budget_s:g} s" if budget_s < inf else "")
        for what, took_s, budget_s in parts
    )
    return f"{said}; {', '.join(measured)}"

"""When what happened to a request, whether its SLA was kept, and which stage broke it. Pure.

The gateway judges by the tokens it was sent; the scheduler, and who replays its log, by what
workers report.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from services.core import FinishReason, Sla


class SlaMissCause(StrEnum):
    """Which stage broke the agreement."""

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
    """When what happened to one choice, on its owner's clock."""

    arrival_s: float
    placed_s: float = inf
    first_token_s: float = inf
    last_token_s: float = inf
    ended_s: float = inf
    tokens: int = 0
    longest_gap_s: float = 0.0
    preempted_gap_s: float = 0.0  # longest gap with a preemption inside
    preempted_s: float = 0.0  # time between tokens around preemptions, in all
    swap_in_gap_s: float = 0.0  # of the longest such gap, what followed its admission again
    swap_in_s: float = 0.0  # the same of all such gaps; only where its KV had been kept
    away: bool = False  # preempted since the last token
    swap_in_since_s: float = inf  # since when it waits for its KV to come back
    rejected: bool = False
    gap_s: float | None = None  # before the last tokens; None for the first

    def on_tokens(self, count: int, now_s: float, gaps: int = 1) -> None:
        """`count` tokens came at once; or, where only that is known, with so many equal gaps
        since the last of before."""
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
        """No token comes until it is placed or resumed."""
        self.away, self.swap_in_since_s = True, inf

    def on_resumed(self, kv_kept: bool, now_s: float) -> None:
        """Admitted again where it was: its KV comes back, or is computed again."""
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
        """Time to the first token, or to the end if none came."""
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


def judge_sla(sla: Sla, line: RequestTimeline, reason: FinishReason) -> SlaMissCause:
    """NONE when the agreement was kept, else the stage that broke it first.

    A TTFT miss is laid to the longer of queueing and prefill; a gap or pace miss to preemption
    where, without it, the budget would have held, and then to the longer of its two waits: to be
    admitted again, and for its KV to come back from host memory. The client is to blame where it
    left. One that takes its tokens slowly is not: at its socket that looks like a gateway that is
    slow to write them, and we don't excuse ourselves by what may be our own doing.
    """
    if line.rejected:
        return SlaMissCause.REJECTED
    if line.ttft_s > sla.ttft_s:
        return SlaMissCause.QUEUED if line.queued_s * 2 >= line.ttft_s else SlaMissCause.PREFILL
    if line.longest_gap_s > sla.mtpot_s:
        preempted = line.preempted_gap_s > sla.mtpot_s
        return (
            _of_absence(line.swap_in_gap_s, line.preempted_gap_s)
            if preempted
            else SlaMissCause.DECODE
        )
    if line.tpot_s > sla.tpot_s:
        steps = max(1, line.tokens - 1)
        unbroken_s = (line.decode_s - line.preempted_s) / steps
        unbroken = unbroken_s <= sla.tpot_s
        return _of_absence(line.swap_in_s, line.preempted_s) if unbroken else SlaMissCause.DECODE
    return _of_ending(line, reason)


def _of_absence(swap_in_s: float, away_s: float) -> SlaMissCause:
    return SlaMissCause.SWAP_IN if swap_in_s * 2 > away_s else SlaMissCause.PREEMPTED


def _of_ending(line: RequestTimeline, reason: FinishReason) -> SlaMissCause:
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        return SlaMissCause.NONE
    if reason is FinishReason.CANCELLED:
        return SlaMissCause.CLIENT
    if line.tokens and line.away:
        swap_in_s = max(0.0, line.ended_s - line.swap_in_since_s)
        return _of_absence(swap_in_s, line.ended_s - line.last_token_s)
    if line.tokens:
        return SlaMissCause.DECODE
    return SlaMissCause.QUEUED if line.placed_s == inf else SlaMissCause.PREFILL


BECAUSE = {
    SlaMissCause.REJECTED: "it was refused",
    SlaMissCause.QUEUED: "it waited too long to be placed",
    SlaMissCause.PREFILL: "its prompt was worked on for too long",
    SlaMissCause.PREEMPTED: "it was preempted for too long",
    SlaMissCause.SWAP_IN: "its KV took too long to come back from host memory",
    SlaMissCause.DECODE: "its tokens came too slowly, or not to their end",
    SlaMissCause.CLIENT: "its client left",
}


def explain_sla(sla: Sla, line: RequestTimeline, reason: FinishReason) -> str:
    """The verdict in words, with what was measured beside the budgets that there are."""
    cause = judge_sla(sla, line, reason)
    missed = f"SLA {sla.name} missed ({cause}): {BECAUSE.get(cause, '')}"
    said = missed if cause else f"SLA {sla.name} met"
    if not line.tokens:
        return said
    parts = [("first token after", line.ttft_s, sla.ttft_s)]
    if line.tokens > 1:
        parts.append(("mean gap", line.tpot_s, sla.tpot_s))
        parts.append(("longest gap", line.longest_gap_s, sla.mtpot_s))
    measured = (
        f"{what} {took_s:.3f} s" + (f" of {budget_s:g} s" if budget_s < inf else "")
        for what, took_s, budget_s in parts
    )
    return f"{said}; {', '.join(measured)}"

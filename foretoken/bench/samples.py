"""The record of each request of a load, as its client measured it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

TIMED_OUT = "not answered in time"
UNREACHABLE = "unreachable"
TRUNCATED = "the stream ended early"
STOPPED = "stopped"  # by Ctrl-C; counts as neither an answer nor an error


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds from the start of the load.

    due_s: scheduled send time; latencies count from it, so that a late client does not flatter
    the server. sent_s: actual send time. text_s: arrival times of messages with text. problem:
    empty for a complete answer, else the cause. status: HTTP status, 0 without a response.
    output_tokens: the server's count if `has_usage`, else the number of messages with text.
    """

    due_s: float
    sla_class: str = ""
    sent_s: float = 0.0
    end_s: float = 0.0
    text_s: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    status: int = 0
    problem: str = ""
    finish_reason: str = ""

    @property
    def complete(self) -> bool:
        return not self.problem

    @property
    def ttft_s(self) -> float:
        """Time to the first text; to the end for an answer without text."""
        return (self.text_s[0] if self.text_s else self.end_s) - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens; None for an answer of fewer than two."""
        if self.output_tokens < 2 or not self.text_s:
            return None
        return (self.text_s[-1] - self.text_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> Sequence[float]:
        """Times between messages with text; a message may carry several tokens."""
        return [after - before for before, after in pairwise(self.text_s)]

    @property
    def longest_gap_s(self) -> float:
        return max(self.gaps_s, default=0.0)

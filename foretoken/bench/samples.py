"""What became of each request of a load, as its client saw it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

LATE = "not answered in time"
UNREACHABLE = "unreachable"
CUT = "ended without its end"
STOPPED = "stopped"  # by Ctrl-C: neither an answer nor an error


def no_times() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class Sample:
    """One request, in seconds from the beginning of the load.

    due_s: when it was to be sent; all latencies count from there, so that what a client sends late
    is not a server's gift. sent_s: when this client began to send it.
    text_s: when messages with text came. problem: empty where the whole answer came, else why not;
    status: of HTTP, 0 where nothing came.
    output_tokens are counted by the server where `told`, else one for each message with text.
    """

    due_s: float
    sla_class: str = ""
    sent_s: float = 0.0
    end_s: float = 0.0
    text_s: "array[float]" = field(default_factory=no_times)
    prompt_tokens: int = 0
    output_tokens: int = 0
    told: bool = False
    status: int = 0
    problem: str = ""
    finish_reason: str = ""

    @property
    def whole(self) -> bool:
        return not self.problem

    @property
    def ttft_s(self) -> float:
        """To the first text; an answer without any has its end for that."""
        return (self.text_s[0] if self.text_s else self.end_s) - self.due_s

    @property
    def last_s(self) -> float:
        return self.text_s[-1] if self.text_s else self.end_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Between two tokens, on average; None for an answer of less than two."""
        if self.output_tokens < 2 or not self.text_s:
            return None
        return (self.text_s[-1] - self.text_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> Sequence[float]:
        """Between messages with text: what a reader waits. A message may bring several tokens."""
        return [after - before for before, after in pairwise(self.text_s)]

    @property
    def longest_gap_s(self) -> float:
        return max(self.gaps_s, default=0.0)

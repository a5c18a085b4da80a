"""Suspicion of silent workers. Pure.

A worker says something at least every `worker.heartbeat_s`. One that is silent for much longer than
it usually is hangs, or its machine does, although its stream is open. The scheduler counts silence
in small turns: a scheduler that was stopped itself has heard nothing in the meantime, and that says
nothing about the workers.
"""

from dataclasses import dataclass, replace
from math import inf

CHECK_S = 0.25  # between two checks
MAX_TURN_S = 2 * CHECK_S  # the most that one check adds to a silence
GAP_HALF_S = 30.0  # in which a remembered gap counts half
STEADY_S = 1.0  # for which a suspected worker is heard again before it is trusted


@dataclass(frozen=True)
class SuspicionLimits:
    """A worker is suspected after a silence of `least_s`, and of `gaps` times its longest recent
    gap between two messages. Infinite: never."""

    least_s: float = inf
    gaps: float = 3.0


@dataclass(frozen=True, slots=True)
class Silence:
    """How long a worker has been silent, and whether it is suspected."""

    quiet_s: float = 0.0  # since its last message
    gap_s: float = 0.0  # the longest recent gap between two messages, outside of suspicion
    steady_s: float = 0.0  # since it was heard again
    suspected: bool = False

    def after(self, turn_s: float, heard: bool, limits: SuspicionLimits) -> "Silence":
        """The state after a further turn in which a message came, or none did. O(1)."""
        turn_s = min(turn_s, MAX_TURN_S)
        quiet_s, steady_s = self.quiet_s + turn_s, self.steady_s + turn_s
        if not heard:
            if quiet_s >= max(limits.least_s, limits.gaps * self.gap_s):
                return Silence(quiet_s, self.gap_s, suspected=True)
            return replace(self, quiet_s=quiet_s, steady_s=steady_s if self.suspected else 0.0)
        gap_s = self.gap_s * 0.5 ** (turn_s / GAP_HALF_S)
        if not self.suspected:
            return Silence(gap_s=max(gap_s, quiet_s))
        if steady_s >= STEADY_S:
            return Silence(gap_s=gap_s)
        return Silence(gap_s=gap_s, steady_s=steady_s, suspected=True)


NOT_SILENT = Silence()

"""When a process that has ended is started again, and when no more. Pure."""

from dataclasses import dataclass

from services.runtime.backoff import Backoff

RESTARTS = Backoff(0.5, 30.0)


@dataclass(frozen=True, slots=True)
class Patience:
    """What ran for `steady_s` had no lasting fault: it is started again soon. `ends_max` ends, each
    within so long of its start, and it is given up."""

    backoff: Backoff = RESTARTS
    steady_s: float = 60.0
    ends_max: int = 5


class Lives:
    """Of one process: its ends so far that came early."""

    def __init__(self, patience: Patience):
        self._patience = patience
        self.early = 0

    def ended(self, lived_s: float) -> float | None:
        """Seconds until it is started again; None where it is given up."""
        patience = self._patience
        self.early = 0 if lived_s > patience.steady_s else self.early + 1
        if self.early >= patience.ends_max:
            return None
        return patience.backoff.after_s(max(0, self.early - 1))

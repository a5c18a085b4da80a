"""When to restart a process that exited, and when to do without it. Pure."""

from dataclasses import dataclass

from services.runtime.network.backoff import Backoff

RESTART_BACKOFF = Backoff(0.5, 30.0)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A process that ran for `steady_s` is restarted at once. After `max_exits` consecutive exits,
    each within `steady_s` of the start, it is given up and tried again every `retry_s`."""

    backoff: Backoff = RESTART_BACKOFF
    steady_s: float = 60.0
    max_exits: int = 5
    retry_s: float = 600.0


class RestartCounter:
    """Counts the consecutive early exits of one process."""

    def __init__(self, policy: RestartPolicy):
        self._policy = policy
        self.early_exits = 0

    def record_exit(self, uptime_s: float) -> float | None:
        """Returns the delay until the restart, in seconds, or None to give the process up."""
        policy = self._policy
        self.early_exits = 0 if uptime_s > policy.steady_s else self.early_exits + 1
        if self.early_exits >= policy.max_exits:
            return None
        return policy.backoff.after_s(max(0, self.early_exits - 1))

"""A token bucket of CPU seconds."""


class CpuBudget:
    """Fills at `share` CPU seconds per second up to `saved_s`, and starts full.

    Work may start while the balance is not negative. It is charged when its cost is known, so the
    balance can become negative; the next work waits until it is 0. With a share of 1 a single
    thread never waits. All times are readings of one clock.
    """

    def __init__(self, share: float, saved_s: float, now_s: float):
        self.spent_s = 0.0
        self._share, self._saved_s = share, saved_s
        self._left_s, self._at_s = saved_s, now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until work may start; 0 when it may start now."""
        return max(0.0, -self._filled(now_s)) / self._share

    def spend(self, cpu_s: float, now_s: float) -> None:
        """Charges finished work. The bucket was refilled during the work."""
        self._left_s = min(self._filled(now_s) - cpu_s, self._saved_s)
        self._at_s = now_s
        self.spent_s += cpu_s

    def _filled(self, now_s: float) -> float:
        """Balance without the limit, which applies after the work is charged."""
        return self._left_s + self._share * (now_s - self._at_s)

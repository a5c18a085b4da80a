"""How much of a core may be spent: a token bucket of CPU seconds."""


class Budget:
    """Fills by `share` CPU seconds a second, up to `saved_s`, and starts full.

    Work begins while there is no debt and is paid when its cost is known, so that it may end in
    debt; the next waits until that is filled. With a share of 1 one thread is never in debt: it
    spends no more than the time it takes. Times are readings of one clock.
    """

    def __init__(self, share: float, saved_s: float, now_s: float):
        self.spent_s = 0.0
        self._share, self._saved_s = share, saved_s
        self._left_s, self._at_s = saved_s, now_s

    def wait_s(self, now_s: float) -> float:
        """Until work may begin; 0 if it may now."""
        return max(0.0, -self._filled(now_s)) / self._share

    def spend(self, cpu_s: float, now_s: float) -> None:
        """What work cost that has just ended; the time it took has filled the bucket too."""
        self._left_s = min(self._filled(now_s) - cpu_s, self._saved_s)
        self._at_s = now_s
        self.spent_s += cpu_s

    def _filled(self, now_s: float) -> float:
        """Not cut at what may be saved: what is still to be paid comes out of it first."""
        return self._left_s + self._share * (now_s - self._at_s)

"""A budget for repeated work, as a share of the traffic, so that retries never feed on themselves
(as gRPC's retry throttling and Finagle's retry budget). Pure."""

from collections import Counter

WINDOW_S = 10.0
SLICE_S = 0.5  # counts leave the window one slice at a time


class RetryBudget:
    """Over the last `WINDOW_S`: `share` of the submitted requests plus `floor_per_s`, so that a
    small system can recover from the loss of its only worker."""

    def __init__(self, share: float, floor_per_s: float):
        self._share = share
        self._floor = floor_per_s * WINDOW_S
        self._submitted, self._retried = Counter[int](), Counter[int]()

    def on_submitted(self, now_s: float) -> None:
        """A request was submitted for the first time. O(slices)."""
        _count(self._submitted, now_s)

    def try_spend(self, now_s: float) -> bool:
        """Spends one retry if the budget has room; returns whether it had. O(slices)."""
        allowed = self._floor + self._share * _total(self._submitted, now_s)
        if _total(self._retried, now_s) + 1 > allowed:
            return False
        _count(self._retried, now_s)
        return True


def _slice(now_s: float) -> int:
    return int(now_s // SLICE_S)


def _count(slices: Counter[int], now_s: float) -> None:
    at = _slice(now_s)
    if at not in slices:
        _expire(slices, now_s)
    slices[at] += 1


def _total(slices: Counter[int], now_s: float) -> int:
    _expire(slices, now_s)
    return slices.total()


def _expire(slices: Counter[int], now_s: float) -> None:
    first = _slice(now_s - WINDOW_S)
    for at in [at for at in slices if at <= first]:
        del slices[at]

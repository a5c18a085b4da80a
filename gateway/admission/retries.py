"""How much work may be done again: a share of the traffic, so that retries never feed on
themselves (gRPC's and Finagle's retry budget). Pure."""

from collections import Counter

WINDOW_S = 10.0
SLICE_S = 0.5  # what was counted leaves the window a slice at a time


class RetryBudget:
    """Over the last `WINDOW_S`: `share` of the requests submitted, and `floor_per_s` beside it,
    so that a small system's few are not lost with their one worker."""

    def __init__(self, share: float, floor_per_s: float):
        self._share = share
        self._floor = floor_per_s * WINDOW_S
        self._submitted, self._retried = Counter[int](), Counter[int]()

    def on_submitted(self, now_s: float) -> None:
        """A request went out for the first time. O(slices)."""
        _count(self._submitted, now_s)

    def take(self, now_s: float) -> bool:
        """Whether there is room for one more retry, which is then taken. O(slices)."""
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

"""When a client that asks is promised its first token: what the scheduler tells, with a margin by
what came of those before. Pure.

The scheduler tells an expectation, as if nobody came later, from its workers' side. How far that is
off only shows at the client, so the margin is learnt here, by conformal prediction: of the last
errors, the one that `SHARE` of them don't exceed is what the next promise allows for. Errors come
in waves as load does, and a window of them is late for each; so the share asked of it follows what
was kept: adaptive conformal inference (Gibbs and Candès, 2021).
"""

from bisect import bisect_left, insort
from collections import deque
from math import ceil

SHARE = 0.9  # of the promises that are to be kept
WINDOW = 256  # so many errors count, the newest
LEAST = 20  # before there are so many, `UNTAUGHT` stands in
FLOOR_S = 0.02  # of what is told counts as much more: a hop is no multiple of nothing
UNTAUGHT = 2.0  # told x 2 + 20 ms
GAIN = 0.005  # of the level, by each promise that was kept or not
LEVELS = (0.5, 1.0)  # between which it stays: the window holds nothing above its largest


class Promises:
    """Of one gateway: a promise is the time from a request's arrival by which its first token goes
    to its client, in about `SHARE` of the requests that are told one.

    That holds in the long run over all who ask: not for each length of wait by itself, nor in the
    first moments of a load that was not seen before. Until `LEAST` have come it is a guess. An
    error is a factor, came over told with `FLOOR_S` on both, so that short waits and long ones can
    teach each other. A promise may be sooner than what was told.

    A promise is O(1); to learn is O(log n), and a move within n numbers.
    """

    def __init__(self) -> None:
        self._errors: deque[float] = deque()  # in the order in which they came
        self._sorted: list[float] = []  # the same
        self._level = SHARE  # the share of them that the next promise allows for

    def of(self, told_s: float) -> float:
        """Seconds from its arrival, for one that is told to get its first token after `told_s`."""
        return max(0.0, self._allowed() * (told_s + FLOOR_S) - FLOOR_S)

    def learn(self, told_s: float, promised_s: float, came_s: float) -> None:
        """The first token of one that was promised came after `came_s`, from its arrival; or it
        ended then without any, later than was promised."""
        if len(self._sorted) >= LEAST:  # who was promised by a guess says nothing of the level
            level = self._level + GAIN * (SHARE - (came_s <= promised_s))
            self._level = min(max(level, LEVELS[0]), LEVELS[1])
        error = (came_s + FLOOR_S) / (told_s + FLOOR_S)
        self._errors.append(error)
        insort(self._sorted, error)
        if len(self._errors) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._errors.popleft())]

    def _allowed(self) -> float:
        """Of n errors the (n + 1) level-th, rounded up: one more is as likely to fall into any of
        the n + 1 spaces between them, so it is no larger with at least that probability."""
        count = len(self._sorted)
        if count < LEAST:
            return UNTAUGHT
        return self._sorted[min(count, ceil((count + 1) * self._level)) - 1]

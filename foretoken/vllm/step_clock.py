"""Times of vLLM's steps, for the cost model."""

from collections import deque
from collections.abc import Collection

from services.costs import StepTiming

MAX_IN_FLIGHT = 16  # steps; vLLM has two at most, or one a pipeline stage


class StepClock:
    """A step takes from the end of the one before it, or from when it was composed if that is
    later. `kv_tokens`: capacity of the cache."""

    def __init__(self, kv_tokens: int):
        self._kv_tokens = kv_tokens
        self._begun: deque[tuple[float, int, int, float]] = deque(maxlen=MAX_IN_FLIGHT)
        self._ended_s = 0.0

    def began(self, tokens: Collection[int], kv_usage: float, now: float) -> None:
        """A step was composed with these tokens for each of its requests. O(requests) in C."""
        decodes = list(tokens).count(1)
        self._begun.append((now, sum(tokens) - decodes, decodes, kv_usage))

    def ended(self, now: float) -> StepTiming | None:
        """The timing of the oldest step that has not ended; None if it computed nothing."""
        if not self._begun:
            return None
        began_s, prefill, decodes, kv_usage = self._begun.popleft()
        elapsed_s = now - max(began_s, self._ended_s)
        self._ended_s = now
        if not prefill + decodes or elapsed_s <= 0:
            return None
        return StepTiming(prefill, decodes, round(kv_usage * self._kv_tokens), elapsed_s)

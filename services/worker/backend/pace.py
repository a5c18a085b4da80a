"""Pace: step times of a server, estimated from the arrivals of its tokens. Pure.

A server with continuous batching gives each of its requests one token a step. Over an interval in
which some requests decode from beginning to end, the number of steps is the mean number of tokens
that these receive, and the interval divided by it is the mean time of a step. Prompts that gave
their first token within the interval were prefilled in its steps. Such a mean has the same linear
cost as a single step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.costs import StepTiming

MIN_STEPS = 4  # of an interval: fewer say more about the network than about steps


@dataclass(slots=True)
class _Stream:
    """A request with arriving tokens."""

    context_tokens: int
    through: bool  # whether it decodes since before the interval began
    tokens: int = 0  # within the interval


@dataclass(slots=True)
class Pace:
    """Measures intervals, each from one `end_interval` to the next."""

    since_s: float = 0.0
    _streams: dict[str, _Stream] = field(default_factory=dict)
    _sent: dict[str, tuple[float, int, bool]] = field(default_factory=dict)
    _prefilled_tokens: int = 0
    _total_tokens: int = 0
    _ready: list[StepTiming] = field(default_factory=list)

    def on_sent(self, request_id: str, context_tokens: int, now_s: float) -> None:
        """A request was sent with this many tokens, all to prefill."""
        alone = not self._streams and not self._sent
        self._sent = {name: (at, n, False) for name, (at, n, _) in self._sent.items()}
        self._sent[request_id] = (now_s, context_tokens, alone)

    def on_tokens(self, request_id: str, count: int, now_s: float) -> None:
        """Tokens of a request arrived."""
        stream = self._streams.get(request_id)
        if stream is None:
            since_s, context, alone = self._sent.pop(request_id, (now_s, 0, False))
            self._streams[request_id] = _Stream(context + count, False)
            self._prefilled_tokens += context
            self._total_tokens += count
            if alone and context and now_s > since_s:
                self._ready.append(StepTiming(context, 0, context, now_s - since_s))
            return
        stream.tokens += count
        stream.context_tokens += count
        self._total_tokens += count

    def on_ended(self, request_id: str) -> None:
        """A request was answered or cut off."""
        self._sent.pop(request_id, None)
        self._streams.pop(request_id, None)

    def end_interval(self, now_s: float) -> list[StepTiming]:
        """The timings that the interval gives."""
        found, self._ready = self._ready, []
        if timing := self._mean_step(now_s):
            found.append(timing)
        for stream in self._streams.values():
            stream.through, stream.tokens = True, 0
        self.since_s = now_s
        self._prefilled_tokens = self._total_tokens = 0
        return found

    def _mean_step(self, now_s: float) -> StepTiming | None:
        through: Mapping[str, _Stream] = {r: s for r, s in self._streams.items() if s.through}
        if not through:
            return None
        steps = sum(stream.tokens for stream in through.values()) / len(through)
        if steps < MIN_STEPS or now_s <= self.since_s:
            return None
        context = sum(stream.context_tokens for stream in self._streams.values())
        return StepTiming(
            round(self._prefilled_tokens / steps),
            max(1, round(self._total_tokens / steps)),
            context,
            (now_s - self.since_s) / steps,
        )

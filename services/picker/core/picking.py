"""Which endpoint gets a request: estimate at each, refuse or order. Pure.

A request goes where it and the requests beside it lose the least time: its own latency there, plus
the time that it adds to the others. Endpoints where it meets its SLA come first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf

import numpy as np

from services.picker.core.lines import Line
from services.policies.form.past_future import PrefixPeaks

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class Cause(StrEnum):
    """Why a request is refused."""

    NO_ENDPOINT = "no_endpoint"
    SHED = "shed"
    FULL = "full"
    TOO_LARGE = "too_large"
    BAD_HEADER = "bad_header"


@dataclass(frozen=True, slots=True)
class Refusal:
    """`message` is shown to the client; `retry_after_s` 0 means do not retry."""

    cause: Cause
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to place: its tokens, the expected ones of its answer, and its SLA."""

    prompt_tokens: float
    output_tokens: float
    ttft_s: float = inf
    tpot_s: float = inf
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """An endpoint when a request is placed.

    `held` and `remaining` have one entry for each request there: its KV tokens, and those it is
    expected to make. `waiting` of them are queued by the server; `ahead_tokens` of prompts are not
    prefilled. `cached_tokens` are those of the request's prompt that are probably cached there.
    `steps` is seconds per token by requests at a time, `prefill` seconds to the first token by
    prompt tokens. A `kv_tokens` of infinity is an unknown capacity.
    """

    address: str
    held: Sequence[float]
    remaining: Sequence[float]
    steps: Line
    prefill: Line
    waiting: int = 0
    ahead_tokens: float = 0.0
    cached_tokens: float = 0.0
    kv_tokens: float = inf


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is expected of a request at an endpoint. `wait_s` is the time until there is room, part
    of `ttft_s`; `added_s` the time that it adds to all others together."""

    address: str
    wait_s: float
    ttft_s: float
    tpot_s: float
    latency_s: float
    added_s: float

    def meets(self, ask: Ask) -> bool:
        return self.ttft_s <= ask.ttft_s and self.tpot_s <= ask.tpot_s

    @property
    def cost_s(self) -> float:
        return self.latency_s + self.added_s


def estimate(ask: Ask, load: Load) -> Estimate:
    """O(n log n) for n requests there: 0.1 ms for 256 if memory is short, else a tenth of it. Most
    endpoints have a few, for which arrays cost more than they save."""
    count = len(load.remaining)
    new_tokens = max(0.0, ask.prompt_tokens - load.cached_tokens)
    step_s = load.steps.at(count)
    wait_s = max(_room_steps(ask, load), _queue_steps(load)) * step_s
    ttft_s = wait_s + load.prefill.at(load.ahead_tokens + new_tokens)
    tpot_s = load.steps.at(count + 1)
    most = ask.output_tokens
    beside = sum([tokens if tokens < most else most for tokens in load.remaining])
    added_s = load.steps.slope * beside + load.prefill.slope * new_tokens * count
    latency_s = ttft_s + ask.output_tokens * tpot_s
    return Estimate(load.address, wait_s, ttft_s, tpot_s, latency_s, added_s)


def _room_steps(ask: Ask, load: Load) -> float:
    """Tokens that each request makes until as many have ended that the peak of the others and of
    this request fits into the KV cache; each is expected to end after its remaining tokens."""
    final = sum(load.held) + sum(load.remaining) + ask.prompt_tokens + ask.output_tokens
    count = len(load.remaining)
    if not count or final <= load.kv_tokens:
        return 0.0
    remaining = np.array(load.remaining)
    longest_first = np.argsort(-remaining)
    remaining = remaining[longest_first]
    held = np.concatenate([[ask.prompt_tokens], np.array(load.held)[longest_first]])
    peaks = PrefixPeaks(1, held, np.concatenate([[ask.output_tokens], remaining])[np.newaxis])
    stay = peaks.count_fitting(count, load.kv_tokens)
    return 0.0 if stay == count else float(remaining[stay])


def _queue_steps(load: Load) -> float:
    """Tokens until all that wait there have a place, one for each running request that ends."""
    count = len(load.remaining)
    waiting = min(load.waiting, count)  # its metrics may be older than the last end
    if not waiting:
        return 0.0
    return waiting / max(1, count - waiting) * sum(load.remaining) / count


def rank(ask: Ask, estimates: Sequence[Estimate], turn: int) -> list[Estimate]:
    """The estimates, the best first. Equal ones take turns."""
    count = len(estimates)
    turned = [estimates[(turn + i) % count] for i in range(count)]
    return sorted(turned, key=lambda each: (not each.meets(ask), each.cost_s))


def shed(ask: Ask, estimates: Sequence[Estimate], max_wait_s: float) -> Refusal | None:
    """A refusal if no endpoint has room for a request of negative priority, or meets its SLA; or if
    any request would wait longer than `max_wait_s` (0: as long as it takes)."""
    least_s = min(each.wait_s for each in estimates)
    if max_wait_s and least_s > max_wait_s:
        message = f"every model server is full for about {least_s:.0f} s; retry later"
        return Refusal(Cause.SHED, message, retry_after_s(least_s - max_wait_s))
    if ask.priority < 0 and not any(not each.wait_s and each.meets(ask) for each in estimates):
        message = "no model server has room for a request of negative priority; retry later"
        return Refusal(Cause.SHED, message, retry_after_s(least_s))
    return None


def retry_after_s(wait_s: float) -> float:
    """Whole seconds, within bounds."""
    return float(ceil(min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s))))

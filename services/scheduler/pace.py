"""How long tokens take: a request's share of the fleet's time, by its workers' cost models."""

from collections.abc import Collection
from dataclasses import dataclass

from services.core import CostModel
from services.scheduler.jobs import Job


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of one worker that a request takes while `seqs` share each step.

    ALISE's `T = s·T0 + n·(α·s + β)` (papers/001 Eq. 3–5), where β is a share of the step: what
    all of a batch still take then adds up to the time in which the batch can make it.
    """

    seqs: float
    prefill_token_s: float
    token_s: float
    context_token_s: float

    def remaining_s(self, tokens: float, context_tokens: int, missing_tokens: int) -> float:
        """To make so many tokens after that context, of which `missing_tokens` have no KV."""
        mean_context = context_tokens + tokens / 2
        decode_s = tokens * (self.token_s + self.context_token_s * mean_context)
        return decode_s + missing_tokens * self.prefill_token_s

    def still_fits(self, seqs: float) -> bool:
        """Whether a batch of so many is near enough to the one it was made for."""
        return self.seqs <= 2 * seqs and seqs <= 2 * self.seqs


def pace_of(costs: Collection[CostModel], seqs: float) -> Pace:
    """The mean over the workers' models, each running `seqs` at once."""
    count, seqs = len(costs), max(1.0, seqs)
    prefill_token_s = sum(cost.prefill_token_s for cost in costs) / count
    token_s = sum(cost.base_s / seqs + cost.decode_seq_s for cost in costs) / count
    context_token_s = sum(cost.context_token_s for cost in costs) / count
    return Pace(seqs, prefill_token_s, token_s, context_token_s)


def remaining_s(job: Job, pace: Pace, tokens: float) -> float:
    """What a job still takes, if it makes so many more tokens (it makes one at least)."""
    context = job.context_tokens
    return pace.remaining_s(max(1.0, tokens), context, max(0, context - job.held_tokens))

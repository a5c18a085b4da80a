"""Time per token: a request's share of the fleet's time, by the workers' cost models."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.forecasttable import ForecastTable
from services.policies.memory import PolicyMemory
from services.policies.snapshot import SelectedColumns, Snapshot

SEQS = "pace_seqs"

Spread = Callable[[Ints, int, int], tuple[Floats, Floats, Floats]]
"""(rows, begin, count) → the forecast lengths of these rows beyond the current output, the seconds
until each, and their masses, (count, rows): from the `begin`-th on, as of `After.points`."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Worker seconds of a request's tokens while `seqs` requests share each step.

    ALISE's `T = s·T0 + n·(α·s + β)` (Zhao et al., 2024, Eq. 3–5) with β as a share of the step: the
    remaining times of a batch add up to the time in which the batch finishes.
    """

    seqs: float
    prefill_token_s: float
    token_s: float
    context_token_s: float

    def remaining_s(self, jobs: SelectedColumns, tokens: Floats) -> Floats:
        """Worker seconds for `tokens` more tokens (at least one), including the prefill of missing
        KV."""
        tokens = np.maximum(tokens, 1.0)
        remaining_s: Floats = tokens / 2
        remaining_s += jobs.context
        remaining_s *= self.context_token_s
        remaining_s += self.token_s
        remaining_s *= tokens
        remaining_s += self._missing_s(jobs)
        return remaining_s

    def expected_s(self, jobs: SelectedColumns) -> Floats:
        """Worker seconds for the tokens that each request is still expected to make."""
        return self.remaining_s(jobs, jobs.total - jobs.output)

    def spread_s(self, jobs: SelectedColumns, forecasts: ForecastTable) -> "Spread":
        """The forecast lengths beyond the current output, with the same seconds for each."""
        after, output = forecasts.after(jobs.forecast, jobs.output, jobs.cap), jobs.output
        token_s = self.token_s + self.context_token_s * jobs.context
        missing_s = self._missing_s(jobs)

        def spread(at: Ints, begin: int, count: int) -> tuple[Floats, Floats, Floats]:
            lengths, masses = after.points(at, begin, count)
            tokens = np.maximum(lengths - output[at], 1.0)
            seconds = tokens * (self.context_token_s / 2)
            seconds += token_s[at]
            seconds *= tokens
            seconds += missing_s[at]
            return lengths, seconds, masses

        return spread

    def _missing_s(self, jobs: SelectedColumns) -> Floats:
        """Worker seconds to prefill the missing KV."""
        return jobs.missing * self.prefill_token_s

    def step_s(self, snapshot: Snapshot) -> float:
        """Clock seconds of a token of each of `seqs` decodes, with the mean context of the running
        requests, or of the queued ones if none runs: a step, or a part of one with speculation."""
        rows = snapshot.running if len(snapshot.running) else snapshot.queued
        jobs = snapshot.jobs
        context = float(np.mean(jobs.context_at(rows))) if len(rows) else 0.0
        return max(1e-6, self.seqs * (self.token_s + self.context_token_s * context))

    def on_clock_s(self, jobs: SelectedColumns, tokens: Floats, step_s: float) -> Floats:
        """Clock seconds from the start of running until `tokens` more (at least one) are made: one
        step each, and the prefill of missing KV first."""
        on_clock_s: Floats = np.maximum(tokens, 1.0)
        on_clock_s *= step_s
        on_clock_s += self._missing_s(jobs)
        return on_clock_s


def measure_pace(snapshot: Snapshot, memory: PolicyMemory) -> tuple[Pace, PolicyMemory]:
    """The fleet's current pace: the mean over the workers' models, each running the same number of
    requests. That number is tracked in powers of two, so that ranks stay stable while a batch
    fluctuates."""
    costs = [worker.cost for worker in snapshot.workers]
    count = max(1, len(costs))
    seqs, known = max(1.0, len(snapshot.running) / count), memory.number(SEQS)
    if seqs / 2 <= known <= 2 * seqs:
        seqs = max(1.0, known)
    pace = Pace(
        seqs,
        sum(cost.prefill_token_s for cost in costs) / count,
        sum((cost.base_s / seqs + cost.decode_seq_s) / cost.tokens_per_step for cost in costs)
        / count,
        sum(cost.context_token_s / cost.tokens_per_step for cost in costs) / count,
    )
    return pace, memory.with_numbers(**{SEQS: seqs})

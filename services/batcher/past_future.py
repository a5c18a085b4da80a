"""Admit by the future peak of memory: Past-Future's Algorithm 1 (papers/000 §3)."""

from math import ceil

import numpy as np

from services.batcher.admission import accumulate, decide, longest_fit
from services.batcher.group import Columns, Decision, GroupView, Params
from services.batcher.peak import PrefixPeaks
from services.forecast import Floats, ForecastTable

ENOUGH_DRAWS = 200  # lengths of running requests drawn in all before one more scenario adds little
MOST_SCENARIOS = 5


def past_future(view: GroupView, params: Params, rng: np.random.Generator) -> Decision:
    """Admit the longest prefix of the queue with M* ≤ (1 − `reserved`) · capacity.

    Every running and queued request gets a length drawn anew from L | L > generated, and M* is
    the peak of the memory that they need until all have ended. One draw of a small batch says
    little, so it is drawn several times (until running requests × scenarios reach 200, at most 5
    scenarios) and the mean of the peaks decides. `reserved` is 0.03 to 0.10 in the paper.

    M* rises with the prefix, so the prefix is searched for, not walked: n running and m queued
    requests (of whom no more are looked at than could fit if they never grew) cost one sort,
    O(scenarios · (n + m) log (n + m)), and about five passes over the sorted rows.
    """
    limit = (1 - params["reserved"]) * view.kv_tokens
    reach = longest_fit(accumulate(view.running.held, view.queued.held), limit, view.room)
    peaks = _foresee(view, min(reach + 1, len(view.queued)), rng)
    return decide(view, _longest_prefix(peaks, reach, limit), peaks, limit)


def _foresee(view: GroupView, queued: int, rng: np.random.Generator) -> PrefixPeaks:
    """Drawn futures of the running and the first `queued`."""
    running, head = view.running, view.queued.head(queued)
    scenarios = min(MOST_SCENARIOS, ceil(ENOUGH_DRAWS / max(1, len(running))))
    remaining = np.concatenate(
        [_draw(view.forecasts, rows, scenarios, rng) for rows in (running, head)], axis=1
    )
    return PrefixPeaks(len(running), np.concatenate([running.held, head.held]), remaining)


def _draw(
    forecasts: ForecastTable, rows: Columns, scenarios: int, rng: np.random.Generator
) -> Floats:
    """Remaining tokens, (scenarios, rows); none below 0, for who is at its max_tokens."""
    which, generated, caps = (
        np.tile(column, scenarios) for column in (rows.forecast, rows.output, rows.max_tokens)
    )
    lengths = forecasts.sample(rng, which, generated, caps)
    return np.maximum(lengths - generated, 0.0).reshape(scenarios, len(rows))


def _longest_prefix(peaks: PrefixPeaks, most: int, limit: float) -> int:
    """The largest k ≤ `most` with peaks(k) ≤ limit; 0 if there is none.

    Peaks are close to linear in k, so interpolation finds the neighbourhood and halving, every
    other step, keeps the worst case logarithmic.
    """
    if most == 0 or peaks(most) <= limit:
        return most
    if peaks(0) > limit:
        return 0
    low, high = 0, most  # peaks(low) ≤ limit < peaks(high)
    halve = False
    while high - low > 1:
        share = 0.5 if halve else (limit - peaks(low)) / (peaks(high) - peaks(low))
        middle = low + min(max(1, round(share * (high - low))), high - low - 1)
        low, high = (middle, high) if peaks(middle) <= limit else (low, middle)
        halve = not halve
    return low

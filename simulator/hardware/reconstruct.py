"""Rebuilds the batches behind a request log: how many steps, and what they computed."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from services.costs import CostModel
from services.forecast import Floats, Ints
from services.policies.snapshot import Bools
from simulator.hardware.request_log import RequestLog

BINS_PER_PHASE = 10  # time bins of the step clock in a median decode phase
MAX_BINS = 2_000  # longer logs get longer bins
RATE_RANGE = (0.6, 1.6)  # of a bin's step rate, relative to the fast requests that span it
UNDER_WEIGHT = 10.0  # of tokens without a step; a paused step counts 1
PAUSED_SHARE = 0.02  # more steps without a token than this: the request may have been paused
RECOMPUTED_SHARE = 0.05  # more than this: it surely was, and its KV was recomputed
FAST = 0.75  # quantile of the step rates of requests that span a bin: the fast ones
PLACEMENTS = 4  # of tokens by a cost model, each with the step times of the one before
MIN_FREE_SHARE = 0.05  # of a step's time that is not prefill; bounds a poor model's step rate


@dataclass(frozen=True)
class DecodePhases:
    """From first to last token of requests that got a token at every step.

    `work` has a row per phase: steps, prefill tokens, decoded sequences and context tokens, summed
    over the steps; `elapsed_s` are the phases' times from `begin_s` to `end_s`.
    """

    work: Floats
    begin_s: Floats
    end_s: Floats

    def __len__(self) -> int:
        return len(self.work)

    @property
    def elapsed_s(self) -> Floats:
        return self.end_s - self.begin_s

    def select(self, rows: Bools) -> "DecodePhases":
        return DecodePhases(self.work[rows], self.begin_s[rows], self.end_s[rows])


def decode_phases(log: RequestLog, missed: Floats, cost: CostModel | None) -> DecodePhases:
    """The work of each phase of the requests that have several tokens and were not paused, by their
    `missed_steps`.

    A log has no times between first and last token. Requests that decode together get their tokens
    at the same steps, so tokens are placed by a common clock of steps: linear in time without a
    cost model, else faster where the model says that steps are short. A prompt's tokens are spread
    evenly between scheduling and first token. A request that was surely paused was recomputed once:
    its prompt and half of its output are spread evenly over its phase. O(requests x events that
    each spans).
    """
    times = np.unique(np.concatenate([log.scheduled_s, log.first_token_s, log.last_token_s]))
    spans = _Spans(
        *(np.searchsorted(times, t) for t in (log.scheduled_s, log.first_token_s, log.last_token_s))
    )
    widths_s = np.diff(times)
    work = _window_work(log, missed > RECOMPUTED_SHARE, spans, widths_s, widths_s)
    if cost is not None:
        for _ in range(PLACEMENTS):
            steps = widths_s / _step_s(cost, work, widths_s)
            work = _window_work(log, missed > RECOMPUTED_SHARE, spans, widths_s, steps)
    sums = np.zeros((4, len(times)))
    sums[1:, 1:] = np.cumsum(np.stack([work.prefill, work.tokens, work.context]), axis=1)
    rows = np.flatnonzero((missed <= PAUSED_SHARE) & (log.output_tokens > 1))
    done = (sums[:, spans.last] - sums[:, spans.first]).T[rows]
    done[:, 0] = log.output_tokens[rows] - 1
    return DecodePhases(done, log.first_token_s[rows], log.last_token_s[rows])


def missed_steps(log: RequestLog) -> Floats:
    """The share of steps between a request's first and last token at which it got none, because it
    was paused for lack of memory.

    Every request gets at most one token a step, and exactly one while it runs. The step rate of
    each time bin is the least that explains all tokens: a linear program that minimises the steps
    at which requests got no token, plus `UNDER_WEIGHT` times the tokens for which there is no step.
    Rates are constant within a bin, which makes errors of 1 to 3 %. Of the requests that a
    simulated engine evicted, half to three quarters exceed `PAUSED_SHARE`, those with short gaps do
    not; of the others up to 10 % do, which only leaves fewer to fit.
    """
    steps = log.output_tokens - 1
    end_s = float(log.last_token_s.max())
    start_s = float(log.first_token_s.min())
    phase_s = float(np.median(log.last_token_s - log.first_token_s))
    if not phase_s:
        return np.zeros(len(log))
    count = int(min(MAX_BINS, np.ceil(BINS_PER_PHASE * (end_s - start_s) / phase_s)))
    edges = np.linspace(start_s, end_s, count + 1)
    shared_s = np.minimum(log.last_token_s[:, None], edges[1:])
    shared_s = np.maximum(shared_s - np.maximum(log.first_token_s[:, None], edges[:-1]), 0.0)
    spanned = shared_s.sum(axis=0) > 0
    rates = steps / np.maximum(log.last_token_s - log.first_token_s, 1e-9)
    fast = np.array([np.quantile(rates[column > 0], FAST) for column in shared_s.T[spanned]])
    rows, bins = np.nonzero(shared_s[:, spanned])
    shared_s = shared_s[:, spanned]
    requests, used = shared_s.shape
    values = np.concatenate([-shared_s[rows, bins], np.full(requests, -1.0)])
    at = (
        np.concatenate([rows, np.arange(requests)]),
        np.concatenate([bins, used + np.arange(requests)]),
    )
    constraints = coo_array((values, at), shape=(requests, used + requests)).tocsr()
    costs = np.concatenate([shared_s.sum(axis=0), np.full(requests, UNDER_WEIGHT)])
    low, high = RATE_RANGE
    bounds = [(low * r, high * r) for r in fast] + [(0.0, None)] * requests
    found = linprog(costs, A_ub=constraints, b_ub=-steps, bounds=bounds, method="highs")
    without_token = shared_s @ found.x[:used] - steps
    return np.asarray(np.maximum(0.0, without_token) / np.maximum(steps, 1))


def peak_load(log: RequestLog) -> tuple[int, int]:
    """Returns the most requests that ran together and the most KV tokens that they held, if none
    was paused."""
    times = np.unique(np.concatenate([log.scheduled_s, log.last_token_s]))
    running = np.zeros(len(times))
    held = np.zeros(len(times))
    begin = np.searchsorted(times, log.scheduled_s)
    end = np.searchsorted(times, log.last_token_s)
    for row, (i, k) in enumerate(zip(begin, end, strict=True)):
        decoding_s = max(log.last_token_s[row] - log.first_token_s[row], 1e-9)
        share = np.clip((times[i + 1 : k + 1] - log.first_token_s[row]) / decoding_s, 0.0, 1.0)
        running[i:k] += 1
        held[i:k] += log.input_tokens[row] + share * log.output_tokens[row]
    return int(running.max()), int(np.ceil(held.max()))


@dataclass(frozen=True)
class _Spans:
    """Indices into the event times, per request."""

    scheduled: Ints
    first: Ints
    last: Ints


@dataclass(frozen=True)
class _WindowWork:
    """What was computed between consecutive events."""

    tokens: Floats  # decoded
    prefill: Floats  # prompt tokens
    context: Floats  # read by decoded sequences and prompts
    running: Floats  # sequences that decode


def _window_work(
    log: RequestLog, recomputed: Bools, spans: _Spans, widths_s: Floats, steps: Floats
) -> _WindowWork:
    """Places tokens in windows of which each has this number of steps, up to a factor."""
    clock = np.concatenate([[0.0], np.cumsum(steps)])
    times = np.concatenate([[0.0], np.cumsum(widths_s)])
    tokens, prefill, context, running = (np.zeros(len(widths_s)) for _ in range(4))
    for row in range(len(log)):
        prompt, output = log.input_tokens[row], log.output_tokens[row]
        i, k = spans.first[row], spans.last[row]
        if k > i:
            share = (clock[i : k + 1] - clock[i]) / (clock[k] - clock[i])
            held = 1 + (output - 1) * share
            tokens[i:k] += np.diff(held)
            context[i:k] += np.diff(prompt * held + held * held / 2)
            running[i:k] += 1
            if recomputed[row]:
                prefill[i:k] += (prompt + output / 2) * widths_s[i:k] / (times[k] - times[i])
        i, k = spans.scheduled[row], spans.first[row]
        if k > i:
            prefill[i:k] += prompt * widths_s[i:k] / (times[k] - times[i])
    return _WindowWork(tokens, prefill, context + prefill, running)


def _step_s(cost: CostModel, work: _WindowWork, widths_s: Floats) -> Floats:
    """Seconds of a step in each window: the prompt tokens of a step are their rate times the step's
    own time, so t = decode + rate·t·prefill, solved for t."""
    decoded = np.maximum(work.tokens, 1e-9)
    context = (work.context - work.prefill) / decoded * work.running
    decode_s = cost.base_s + cost.decode_seq_s * work.running + cost.context_token_s * context
    prefill_share = (cost.prefill_token_s + cost.context_token_s) * work.prefill / widths_s
    step_s = decode_s / np.maximum(MIN_FREE_SHARE, 1 - prefill_share)
    return np.asarray(np.maximum(step_s, 1e-9))

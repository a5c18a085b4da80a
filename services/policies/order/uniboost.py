"""UniBoost: boosted arrival without a forecast, with preemption at growing thresholds of output.

"Beyond Prediction: Tail-Aware Scheduling for LLM Inference" (Li et al., ICML 2026, arXiv
2606.18431) and its pull request to SGLang (#35637). Waiting and running requests have one order,
the arrival minus γ-Boost's boost (order/boost.py). The work is what is known without a forecast:
the prefill of the prompt, and the decode up to the next threshold of output, `stretch_tokens` ·
2^k. A new request therefore has a large boost, which vanishes as it runs.

  MemGuard  A request keeps its place from each start until its output reaches the next threshold.
            The number of times that it can be preempted grows with the logarithm of its length.
  γ-Ada     γ follows the ratio of the 99th to the 95th percentile of response times. Above that of
            an exponential tail, long requests wait too long, and γ rises towards arrival order.
            Below it, γ falls towards shortest first. The paper's gains are not at hand; GAIN,
            SPEED and the range of γ are foretoken's.

The order is not told which prompts a worker has cached, so that a cached prefix gives no bonus, nor
why a request ended: one that its client cancels counts as a response.
"""

from math import exp, inf, log

import numpy as np

from services.forecast import Floats, Ints
from services.policies.memory import PolicyMemory
from services.policies.order.boost import boost_s
from services.policies.order.pace import measure_pace
from services.policies.order.ranking import Ranking, limit_preemption
from services.policies.parameters import Param, Params
from services.policies.snapshot import Snapshot

ARRIVAL_S, UNTIL = "arrival_s", "until_tokens"
GAMMA, T95_S, T99_S = "gamma", "t95_s", "t99_s"
EXPONENTIAL = log(100) / log(20)  # t99/t95 of an exponential tail
GAIN = 0.25  # a response above t99 raises it by about a quarter; 100 below it lower it by as much
SPEED = 0.05  # of the logarithm of γ, in each response

PARAMS = {
    "gamma": Param(0.3, 1e-6, 1e6),
    "gamma_range": Param(1000.0, 1.0, 1e6),
    "stretch_tokens": Param(32.0, 1.0, 1e6),
}


def uniboost(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By boosted arrival, with the work of `next_threshold` tokens. O(jobs log jobs)."""
    jobs, split = snapshot.live, len(snapshot.queued)
    rows = jobs.rows
    pace, memory = measure_pace(snapshot, memory)
    memory = _follow_tail(snapshot, params, memory)
    prompt, output = jobs.prompt, jobs.output
    tokens = next_threshold(output, params["stretch_tokens"])
    work_s = prompt * pace.prefill_token_s
    work_s += tokens * (pace.token_s + pace.context_token_s * (prompt + tokens / 2))
    gamma = memory.number(GAMMA, params["gamma"])
    key = jobs.arrival_s - snapshot.now
    key -= boost_s(work_s / max(1, len(snapshot.workers)), gamma)

    (until,) = memory.recall((UNTIL,), rows, jobs.serial)
    until = np.where(until > 0, until, tokens)
    until[:split] = 0.0
    queue_key = limit_preemption(snapshot, key, key[split:], output[split:] < until[split:])
    memory = memory.with_columns(rows, jobs.serial, **{ARRIVAL_S: jobs.arrival_s, UNTIL: until})
    remaining_s = pace.expected_s(jobs)
    return Ranking(rows, split, key, queue_key, remaining_s, np.full(len(rows), inf), inf, memory)


def next_threshold(output: Ints, stretch: float) -> Floats:
    """The least `stretch` · 2^k above each output; k ≥ 0."""
    doublings = np.floor(np.log2(np.maximum(output, 1) / stretch)) + 1
    thresholds: Floats = stretch * 2.0 ** np.maximum(doublings, 0.0)
    return thresholds


def _follow_tail(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> PolicyMemory:
    """Moves both percentiles, then γ, by the requests that ended since the last round, for any
    reason.

    Stochastic approximation of a quantile q: a larger value raises the logarithm of the estimate by
    GAIN · q, another lowers it by GAIN · (1 − q). Many values at once move it at most to the
    largest or the smallest of them, and γ by the whole ratio. O(jobs log jobs).
    """
    known, jobs = memory.ranks, snapshot.jobs
    live = np.zeros(len(jobs), bool)
    live[snapshot.live.rows] = True
    ended = ~live[known.rows] | (jobs.serial[known.rows] != known.serials)
    if not ended.any():
        return memory
    responses_s = np.maximum(snapshot.now - known.values[ARRIVAL_S][ended], 1e-9)
    count, least_s, most_s = len(responses_s), float(responses_s.min()), float(responses_s.max())
    found = []
    for name, share in ((T95_S, 0.95), (T99_S, 0.99)):
        before_s = memory.number(name, most_s)
        above = float(np.count_nonzero(responses_s > before_s))
        moved = log(before_s) + GAIN * (above - (1.0 - share) * count)
        least, most = log(min(before_s, least_s)), log(max(before_s, most_s))
        found.append(exp(min(max(moved, least), most)))
    t95_s, t99_s = found[0], max(found)
    gamma, spread = params["gamma"], params["gamma_range"]
    moved = memory.number(GAMMA, gamma) * (t99_s / t95_s / EXPONENTIAL) ** min(SPEED * count, 1.0)
    bounded = min(max(moved, gamma / spread), gamma * spread)
    return memory.with_numbers(**{T95_S: t95_s, T99_S: t99_s, GAMMA: bounded})

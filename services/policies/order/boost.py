"""Boosted arrival: first come, first served, with short requests moved ahead by a bounded time.

γ-Boost of "Strongly Tail-Optimal Scheduling in the Light-Tailed M/G/1" (Yu and Scully, SIGMETRICS
2024), §3: the key is the arrival minus the boost b(w) = (1/γ) · ln(1 / (1 − e^(−γ·w))) of the work
w. The boost of little work is large, that of much work tends to 0. A request never waits behind one
that arrives later by more than the largest boost, unless its tenant is above its share. No other
rule prevents starvation, so that the longest wait is bounded while the backlog is.

Three choices are foretoken's:

  γ        `decay` over the time in which the fleet serves all live requests. Sizes then matter as
           much in a short queue as in a long one. Near 0 it is shortest first, at infinity FCFS.
  w        the index of `per_token_s`, because sizes are forecast
  in time  A first token is due at `ttft_s` after arrival, the next token at `mtpot_s` after the
           last one. From `early_s` before that, a request without a token counts as the geometric
           mean of the first token's work and its whole work. This also holds when the token is
           late, and while the prompt is computed. Otherwise late prompts take turns without an end.
           A paused request counts as GAP_WORK of its work while its SLA can be met: to keep
           that SLA, all of the work has to be done in time. With the boost of one token instead,
           the engine would make little more than first tokens at four times its capacity, those
           of short requests at the last moment, and started requests would take turns until few
           of them meet their SLA.
"""

from math import inf

import numpy as np

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order.deadlines import any_budget, gap_slack_s, slack_s
from services.policies.order.fairness import is_over_share
from services.policies.order.pace import Pace, Spread, measure_pace
from services.policies.order.ranking import (
    HYSTERESIS,
    Ranking,
    earliest_s,
    limit_preemption,
)
from services.policies.order.shortest import known_sizes, least_ratio
from services.policies.parameters import Param, Params
from services.policies.snapshot import SelectedColumns, Snapshot

LEAST_BACKLOG_S = 1e-3
GAP_WORK = 0.5  # with 0.25, goodput is 0.01 higher at 1.6 × capacity and 0.01 lower at 3 ×
SLA_HYSTERESIS = 2.0  # with 4, goodput is up to 0.05 higher on a new server, and TTFT p99 as well
LEAST_WORK = 1e-12  # least γ·w, so that the boost is finite

PARAMS = {"decay": Param(0.5, 1e-6, 1e6), "early_s": Param(0.25, 0.0, 1e6), **HYSTERESIS}


def boost(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By boosted arrival; requests of tenants above their share while others wait go last.

    A queued request preempts a running one only if it also precedes it when the work of the running
    one is less by the share `hysteresis`; by twice that share while the running one has a gap
    budget and can meet its SLA, which a pause is likely to end. O(jobs log jobs), and O(64) for
    each request that changed.
    """
    jobs, split = snapshot.live, len(snapshot.queued)
    rows = jobs.rows
    pace, memory = measure_pace(snapshot, memory)
    remaining_s = pace.expected_s(jobs)
    workers = max(1, len(snapshot.workers))
    gamma = params["decay"] * workers / max(LEAST_BACKLOG_S, float(np.sum(remaining_s)))

    def work(count: int, spread: Spread) -> Floats:
        return per_token_s(count, spread, pace.token_s)

    whole_s, kept, memory = known_sizes(snapshot, memory, pace, work)
    slack = slack_s(snapshot, pace)
    spare_s = _next_token_slack_s(snapshot, split, slack) - params["early_s"]
    due = (spare_s <= 0).nonzero()[0]
    work_s = whole_s
    if len(due):
        work_s = whole_s.copy()
        work_s[due] = _due_work_s(jobs.select(due), whole_s[due], pace)
    key = jobs.arrival_s - snapshot.now - boost_s(work_s / workers, gamma)
    over = is_over_share(snapshot, rows, split, key)
    if over.any():
        key[over] += np.ptp(key) + 1.0
    hysteresis = _hysteresis(snapshot, params["hysteresis"], slack[split:])
    passed = key[split:] - np.log1p(hysteresis) / gamma  # -inf: none is preempted
    queue_key = limit_preemption(snapshot, key, passed)
    next_s = earliest_s(snapshot.now, spare_s)
    memory = memory.with_columns(rows, jobs.serial, **kept)
    no_lift = np.full(len(rows), inf)
    return Ranking(rows, split, key, queue_key, remaining_s, no_lift, next_s, memory)


def _due_work_s(jobs: SelectedColumns, whole_s: Floats, pace: Pace) -> Floats:
    """The work as which each of these counts, given the whole: its next token is due."""
    token_s = np.minimum(pace.remaining_s(jobs, np.ones(len(jobs))), whole_s)
    due_s: Floats = np.where(jobs.output == 0, np.sqrt(token_s * whole_s), GAP_WORK * whole_s)
    return due_s


def _next_token_slack_s(snapshot: Snapshot, split: int, slack: Floats) -> Floats:
    """Time until the next token of each request is due: the first after `ttft_s`, the next of a
    paused request after `mtpot_s` while the SLA can be met, by its `slack`. Infinite for running
    requests with a token."""
    jobs = snapshot.live
    if not any_budget(jobs.board.ttft_s, jobs.board.mtpot_s):
        return np.full(len(jobs), inf)
    left_s = gap_slack_s(snapshot, split)
    left_s[(left_s <= 0) | (slack <= 0)] = inf
    first_s = jobs.arrival_s + jobs.ttft_s - snapshot.now
    next_s: Floats = np.where(jobs.output == 0, first_s, left_s)
    return next_s


def _hysteresis(snapshot: Snapshot, share: float, slack: Floats) -> Floats:
    """The share by which work must be less to preempt each running request, given the slack of its
    SLA."""
    keeps = (slack > 0) & np.isfinite(snapshot.jobs.mtpot_s[snapshot.running])
    hysteresis: Floats = np.where(keeps, SLA_HYSTERESIS * share, share)
    return hysteresis


def boost_s(work_s: Floats, gamma: float) -> Floats:
    """b(w) in seconds, for γ in 1/s."""
    boosts: Floats = -np.log(-np.expm1(-np.maximum(gamma * work_s, LEAST_WORK))) / gamma
    return boosts


def per_token_s(count: int, spread: Spread, token_s: float) -> Floats:
    """The Gittins index for the mean latency per token, as seconds of work.

    An end after L tokens counts 1/L, so that the index is the least of E[min(S, d)] / E[1/L; S ≤ d]
    over d: what it costs to gain as much as the end of a request of one token. The work is the root
    of the index times `token_s`: with a known size the geometric mean of the remaining and the
    whole time. A request of unknown size runs until its short ends are unlikely and then loses its
    place. O(count · points).
    """
    work_s: Floats = np.sqrt(token_s * least_ratio(count, spread, np.divide))
    return work_s

"""Batch sizes that keep the budgets of the time per token (`tpot_s`).

The more requests share a step, the longer it takes. Where memory holds more requests than their
budgets allow, a full engine makes the most tokens, and none of them in time. The batch of each
queue is therefore the one with the most tokens per second within the budgets: a request counts
while a step is no longer than its budget, one without a budget always. A few requests with a small
budget do not hold up a large batch of others.
"""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.form.demand import ANY, WorkerQueues
from services.policies.form.lines import Lines

MOST_LEVELS = 8  # different budgets that are told apart; others count as the next smaller of these


def slots_in_time(queues: WorkerQueues, share: float) -> Ints:
    """Of each queue: how many of its first jobs make the most tokens per second in time; ANY if as
    many as the worker runs do, and if no batch is in time. A step may take `share` of a budget.
    O(levels · jobs that the workers run)."""
    most = np.array([worker.max_running for worker in queues.workers])
    lines, slots = queues.lines.upto(most), np.full(len(queues.workers), ANY)
    budget_s = share * queues.jobs.tpot_s[lines.jobs]
    if not np.isfinite(budget_s).any():
        return slots
    token_s = _token_s(queues, lines)
    in_time = np.zeros(len(token_s))
    floor_s = 0.0
    for level_s in _levels(budget_s).tolist():
        here = (floor_s < token_s) & (token_s <= level_s)
        if here.any():
            in_time[here] = lines.running_sums(budget_s >= level_s)[here]
        floor_s = level_s
    rate = in_time / token_s
    asks = lines.sizes > 0
    best = np.zeros(len(slots))
    best[asks] = np.maximum.reduceat(rate, lines.starts[asks])
    size = lines.first(rate >= best[lines.which]) + 1
    limits = asks & (best > 0) & (size < lines.sizes)
    slots[limits] = size[limits]
    return slots


def _token_s(queues: WorkerQueues, lines: Lines) -> Floats:
    """The time per token of a batch of each job and those before it in its queue. New jobs of the
    same sizes replace those that end, so that the prefill of a prompt is spread over its
    answer."""
    rows = [
        (each.base_s, each.prefill_token_s, each.decode_seq_s, each.context_token_s)
        for each in (worker.cost for worker in queues.workers)
    ]
    per_step = np.array([worker.cost.tokens_per_step for worker in queues.workers])
    base_s, prefill_s, decode_s, context_s = np.array(rows).T / per_step
    jobs, which = queues.jobs, lines.which
    total = np.maximum(jobs.total[lines.jobs], 1.0)
    own_s = decode_s[which] + context_s[which] * jobs.context[lines.jobs]
    own_s += prefill_s[which] * jobs.prompt[lines.jobs] / total
    token_s: Floats = base_s[which] + lines.running_sums(own_s)
    return token_s


def _levels(budget_s: Floats) -> Floats:
    """The different budgets, ascending; of many, some that are spread evenly over them."""
    levels: Floats = np.unique(budget_s)
    if len(levels) > MOST_LEVELS:
        levels = levels[np.linspace(0, len(levels) - 1, MOST_LEVELS).astype(int)]
    return levels

"""Batch sizes within the budgets of the time per token: worked examples and a literal search."""

from collections.abc import Sequence
from itertools import chain
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.forecast import certain
from services.policies.decision import WaitReason, explain
from services.policies.form.demand import ANY, WorkerQueues
from services.policies.form.in_time import MOST_LEVELS, slots_in_time
from services.policies.form.lines import Lines
from services.policies.snapshot import RequestColumns, WorkerSnapshot
from tests.examples import examples
from tests.policies.made_snapshots import formed, jobs, node, table

# A step of n requests takes 10 + n ms without prompts and contexts.
PLAIN = CostModel(0.010, 0.0, 0.001, 0.0)


def slots(
    made: RequestColumns, *queues: tuple[WorkerSnapshot, int], share: float = 1.0
) -> list[int]:
    """The slots of queues of so many jobs each."""
    lines = Lines.consecutive(np.array([size for _, size in queues]))
    nothing, workers = np.zeros(len(made), bool), tuple(worker for worker, _ in queues)
    filled = WorkerQueues(
        made.select(np.arange(len(made))), nothing, made.cap, workers, lines,
        table(certain(50)), {}, ~nothing,
    )  # fmt: skip
    return [int(each) for each in slots_in_time(filled, share)]


@pytest.mark.parametrize(
    ("budgets_s", "share", "size"),
    [
        ([0.015] * 8, 1.0, 5),  # 15 ms with 5 requests
        ([0.015] * 8, 0.9, 3),  # 13.5 ms: 13 with 3
        ([0.1] * 8, 1.0, ANY),  # all together take 18 ms
        ([inf] * 8, 1.0, ANY),
        ([0.0105] * 8, 1.0, ANY),  # not even one alone is in time
        ([0.0125] + [0.1] * 7, 1.0, ANY),  # 7 of 8 at 18 ms; 2 of 2 at 12 ms make fewer tokens
        ([0.0145] * 4 + [inf] * 4, 1.0, 4),  # 4 in 14 ms, or the 4 without a budget in 18 ms
        ([0.0145] + [inf] * 7, 1.0, ANY),
    ],
)
def test_batch_makes_the_most_tokens_in_time(
    budgets_s: Sequence[float], share: float, size: int
) -> None:
    made = jobs(len(budgets_s), tpot_s=budgets_s)
    assert slots(made, (node(cost=PLAIN), len(budgets_s)), share=share) == [size]


def test_prompts_and_contexts_and_drafts_count() -> None:
    """A step has 10 ms, for each request 1 ms, 1 ms for a context of 100 tokens and, with 100 of
    prompt to 50 of answer, 2 tokens of prefill, which take 2 ms. Two requests take 18 ms."""
    made = jobs(4, prompt=[100] * 4, total=[50.0] * 4, tpot_s=[0.0185] * 4)
    cost = CostModel(0.010, 0.001, 0.001, 0.00001)
    assert slots(made, (node(cost=cost), 4)) == [2]
    twice = CostModel(0.010, 0.001, 0.001, 0.00001, tokens_per_step=2.0)
    assert slots(made, (node(cost=twice), 4)) == [ANY]  # 13 ms per token with all 4


def test_admission_stops_at_the_batch_in_time() -> None:
    rows = [(10, 0, 50)] * 8
    assert formed("curve", 10_000, [], rows)[0] == 8
    admitted, filled = formed("curve", 10_000, [], rows, {"tpot_share": 1.0}, tpot_s=0.0165)
    assert admitted == 6  # 10 ms, and 1.02 ms for each with a fifth of a prompt token per step
    reasons = [WaitReason.ADMITTED] * 6 + [WaitReason.TOKEN_BUDGETS, WaitReason.BLOCKED]
    assert filled.reasons.tolist() == reasons
    why = explain(reasons[6], filled.first_values[6], filled.second_values[6])
    assert str(why) == "6 requests run, the budgets of the time per token allow 6 of this queue"


BUDGETS_S = st.sampled_from([0.0113, 0.0147, 0.0191, 0.0377, 0.0533, inf])
QUEUES = st.lists(st.lists(BUDGETS_S, max_size=20), min_size=1, max_size=4)


@settings(max_examples=examples(40))
@given(QUEUES, st.integers(0, 2**32))
def test_slots_equal_those_of_a_search(queues: list[list[float]], seed: int) -> None:
    rng, budgets_s = np.random.default_rng(seed), list(chain.from_iterable(queues))
    count = len(budgets_s)
    assert len(set(budgets_s)) <= MOST_LEVELS
    prompt, total = rng.integers(1, 300, count), rng.uniform(1, 300, count)
    made = jobs(count, prompt=prompt, total=total, tpot_s=budgets_s)
    cost = CostModel(0.010, 0.0001, 0.001, 0.00001)
    found = slots(made, *((node(cost=cost), len(queue)) for queue in queues))
    own_s = 0.001 + 0.00001 * prompt + 0.0001 * prompt / np.maximum(total, 1)
    first = 0
    for queue, size in zip(queues, found, strict=True):
        takes_s = 0.010 + np.cumsum(own_s[first : first + len(queue)])
        rates = [
            sum(budget_s >= takes_s[k] for budget_s in queue[: k + 1]) / takes_s[k]
            for k in range(len(queue))
        ]
        if not any(rates) or np.argmax(rates) == len(queue) - 1:
            assert size == ANY
        else:
            assert size == np.argmax(rates) + 1
        first += len(queue)


def test_many_budgets_count_as_the_next_smaller_of_a_few() -> None:
    budgets_s = np.linspace(0.0121, 0.0321, 101)
    (size,) = slots(jobs(101, tpot_s=budgets_s), (node(cost=PLAIN, places=200), 101))
    takes_s = 0.010 + 0.001 * np.arange(1, 102)
    rates = [np.count_nonzero(budgets_s[: k + 1] >= takes_s[k]) / takes_s[k] for k in range(101)]
    assert rates[size - 1] >= 0.8 * max(rates)

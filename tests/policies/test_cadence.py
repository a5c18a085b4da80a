"""The time between plans: a transcript, and what is planned with it."""

from dataclasses import replace

import numpy as np
import pytest

from services.costs import CostModel
from services.forecast import certain
from services.policies.cadence import INTERVAL_S, measure_cadence, steps_to_next_plan
from services.policies.form.curve import CurveDemand
from services.policies.memory import PolicyMemory
from services.policies.snapshot import Snapshot
from tests.policies.made_snapshots import count_fitting, demanded, jobs, node, table

NO_ROWS = np.zeros(0, np.int64)


def observed(memory: PolicyMemory, now: float, *since_s: float) -> PolicyMemory:
    """Observe a round with requests that have waited since these times."""
    made = jobs(len(since_s), since_s=since_s)
    snapshot = Snapshot(now, made, np.arange(len(since_s)), NO_ROWS, (node(),), table())
    return measure_cadence(snapshot, memory)


def test_mean_interval_matches_hand_computation() -> None:
    memory = observed(PolicyMemory(), 10.0, 9.0)
    assert memory.number(INTERVAL_S) == 0  # the first round follows none
    memory = observed(memory, 10.5, 9.0)
    assert memory.number(INTERVAL_S) == pytest.approx(0.05)
    memory = observed(memory, 10.6, 10.55, 10.58)
    assert memory.number(INTERVAL_S) == pytest.approx(0.05)  # none waited through the interval
    memory = observed(memory, 12.0)
    assert memory.number(INTERVAL_S) == pytest.approx(0.05)
    memory = observed(memory, 20.0, 12.0)
    assert memory.number(INTERVAL_S) == pytest.approx(0.045 + 0.1)  # 8 s count as 1 s


def test_steps_follow_the_batch() -> None:
    worker = node(cost=CostModel(0.01, 1.0, 0.001, 0.0001))
    numbers = {INTERVAL_S: 0.09}
    assert steps_to_next_plan(numbers, worker, 5, 150.0) == pytest.approx(0.09 / 0.03)
    assert steps_to_next_plan({}, worker, 5, 150.0) == 0
    drafting = node(cost=replace(worker.cost, tokens_per_step=1.5))
    assert steps_to_next_plan(numbers, drafting, 5, 150.0) == pytest.approx(4.5)


def test_curve_begins_at_the_next_plan() -> None:
    """Two requests of 10 prompt tokens run: one ends after 3 more tokens, the other after 8. The
    third, of 10 + 8 tokens, waits. A step of two takes 20 ms.

    Now 30 tokens are needed, at the third token 39, at the eighth 2 · 18. If the next plan comes
    after 3 steps, the third token counts; after 4 steps only what follows it, too.
    """
    made = jobs(3, cap=[3, 8, 8], forecast=[0, 1, 1])
    worker = node(kv_tokens=1_000, block_tokens=1, cost=CostModel(0.0, 0.0, 0.01, 0.0))

    def need(interval_s: float) -> float:
        demand = demanded(
            "curve",
            made,
            worker,
            table(certain(3), certain(8)),
            {"z": 0.0, "eviction_share": 0.0},
            runs=[True, True, False],
            numbers={INTERVAL_S: interval_s},
        )
        assert isinstance(demand, CurveDemand)
        return count_fitting(demand, range(3), 2, 1)[1](1)

    assert need(0.0) == 39
    assert need(0.06) == 39
    assert need(0.16) == 36
    assert need(60.0) == 36  # a plan for a time after all ends

"""Static batches in virtual time: padding and invalid tokens are computed, charged and counted."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from services.costs import CostModel
from services.policies.preset import choose
from simulator.engine.simulation import RunResult, simulate
from simulator.hardware.hardware import Hardware
from tests.live import ROOT
from tests.simulator.fixtures import INSTANT, SMALL, random_workload, settings, workload

# 1 s a step, 0.1 s a prefilled token, 0.01 s a row, 0.001 s a token that attention reads.
COST = CostModel(1.0, 0.1, 0.01, 0.001)
HAND = Hardware("hand", COST, kv_tokens=1_600, max_batch_tokens=256, attends_padding=True)
THREE = workload([(0.0, 10, 2), (0.0, 20, 4), (0.0, 30, 6)])


def run(hardware: Hardware = HAND, jumps: bool = True) -> RunResult:
    preset = choose("sls", {"batch_size": 3})
    return simulate(settings(preset, hardware, timing=INSTANT, jumps=jumps), THREE)


@pytest.mark.parametrize("jumps", [True, False])
def test_batch_of_three_pads_to_its_longest_prompt_and_continues_to_its_longest_answer(jumps: bool):
    """Prompts of 10, 20 and 30 are padded by 20 + 10 tokens; answers of 2 and 4 continue to 6."""
    result = run(jumps=jumps)
    (usage,) = result.usages
    assert (usage.batches, usage.batch_members) == (1, 3)
    assert usage.padding_tokens == 20 + 10
    assert usage.invalid_tokens == (6 - 2) + (6 - 4)
    assert usage.prefill_tokens == 3 * 30
    assert usage.steps == 6
    assert result.records.tokens.tolist() == [2, 4, 6]


def test_static_batch_costs_its_padded_prompts_and_all_its_rows():
    """SCLS' T_serve (Eq. 1-4) with N = 3 and L = 30: the prefill draws the first token; the k-th of
    five decode steps reads N·(L + k − 1) tokens."""
    prefill_s = 1.0 + 0.1 * 90 + 0.001 * 90
    decode_s = sum(1.0 + 0.01 * 3 + 0.001 * 3 * (30 + k) for k in range(5))
    result = run()
    assert result.usages[0].end_s == pytest.approx(prefill_s + decode_s)
    # The whole batch returns when its longest answer ends.
    assert result.records.last_s.tolist() == pytest.approx([prefill_s + decode_s] * 3)


def test_engine_with_paged_kv_does_not_attend_to_padding():
    saved_s = run().usages[0].end_s - run(replace(HAND, attends_padding=False)).usages[0].end_s
    assert saved_s == pytest.approx(5 * 0.001 * (20 + 10))


def test_slice_pads_to_contexts_and_stops_invalid_tokens_at_its_end():
    """Slices of 3. The first has the padding of whole prompts and one invalid token of the answer
    of 2. The second has contexts of 23 and 33: 10 tokens of padding; an answer of 4 continues from
    1 to 3 tokens: two invalid ones."""
    preset = choose("so", {"batch_size": 3, "slice_tokens": 3})
    result = simulate(settings(preset, HAND, timing=INSTANT), THREE)
    (usage,) = result.usages
    assert (usage.batches, usage.batch_members) == (2, 5)
    assert usage.padding_tokens == (20 + 10) + 10
    assert usage.invalid_tokens == 1 + 2
    assert usage.prefill_tokens == 3 * 30 + 2 * 33


@pytest.mark.parametrize("preset", ["sls", "so", "scls", "vs", "magnus"])
def test_static_batches_on_two_workers_conserve_requests_and_count_alike_in_jumps(preset: str):
    requests = random_workload(5, 60, 40.0)
    hardware = replace(SMALL, attends_padding=True)
    jumped, stepped = (
        simulate(settings(preset, hardware, 2, jumps=jumps), requests) for jumps in (True, False)
    )
    assert jumped.records.tokens.tolist() == requests.output_tokens.tolist()
    assert np.array_equal(jumped.records.last_s, stepped.records.last_s)
    counts = ("batches", "batch_members", "padding_tokens", "invalid_tokens", "steps", "end_s")
    for one, other in zip(jumped.usages, stepped.usages, strict=True):
        assert [getattr(one, name) for name in counts] == [getattr(other, name) for name in counts]
    # A member of a whole-answer batch is in one batch.
    if preset in ("sls", "vs"):
        assert sum(usage.batch_members for usage in jumped.usages) == len(requests)


TIGHT = """
from services.policies.preset import choose
from simulator.engine.settings import RunSettings
from simulator.engine.simulation import simulate
from tests.simulator.fixtures import SMALL, random_workload

settings = RunSettings(choose("glp"), (SMALL,) * 4, max_tokens=256, predictor="history")
print(simulate(settings, random_workload(20, 300, 80.0)).records.last_s.tolist())
"""


@pytest.mark.slow
def test_batches_short_of_memory_run_equally_in_two_processes():
    """Padding is freed in the order of the plan, whatever the order of sets."""
    ends = {
        subprocess.check_output(
            [sys.executable, "-c", TIGHT], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT
        )
        for seed in ("0", "2", "5")
    }
    assert len(ends) == 1

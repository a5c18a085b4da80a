"""Presets do what their papers say, seen in the simulator."""

import numpy as np
import pytest

from simulator.engine.simulation import simulate
from simulator.hardware.hardware import Hardware
from simulator.workload.workload import Workload
from tests.simulator.fixtures import BY_HAND, INSTANT, settings

FOUR = Workload("four", np.zeros(4), np.full(4, 30), np.full(4, 300))


@pytest.mark.parametrize("preset", ["so", "pm", "ab", "lb", "scls"])
def test_scls_slices_prefill_prompt_and_output_again(preset: str):
    """Four requests of 30 prompt and 300 output tokens in slices of 128: each prefills 30, then
    30 + 128, then 30 + 256 tokens (SCLS, Cheng et al., 2024, §5: "the re-computation of the prefill
    phase with each reschedule")."""
    hardware = Hardware("hand", BY_HAND, kv_tokens=20_000)
    made = settings(preset, hardware, timing=INSTANT, max_tokens=1_024)
    result = simulate(made, FOUR)
    assert result.usages[0].prefill_tokens == 4 * (30 + 158 + 286)
    assert result.records.tokens.tolist() == [300] * 4


def test_sequence_level_batches_prefill_once():
    hardware = Hardware("hand", BY_HAND, kv_tokens=20_000)
    result = simulate(settings("sls", hardware, timing=INSTANT, max_tokens=1_024), FOUR)
    assert result.usages[0].prefill_tokens == 4 * 30

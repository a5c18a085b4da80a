"""Presets do what their papers say, seen in the simulator."""

import numpy as np
import pytest

from services.costs import CostModel
from services.policies.preset import choose
from simulator.engine.settings import RunSettings
from simulator.engine.simulation import simulate
from simulator.hardware.hardware import Hardware
from simulator.study import Point, describe_shortages
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


# ALISE (Zhao and Wang, 2024), §3.3: swapped KV is INT8

COST = CostModel(0.01, 1e-4, 1e-4, 1e-6, offload_token_s=1e-5, upload_token_s=2e-5)
SWAPPING = Hardware("swapping", COST, kv_tokens=1_600, host_tokens=6_300)


@pytest.mark.parametrize(("preset", "int8"), [("alise", True), ("alise-oracle", True),
                                              ("alise-defer", False), ("ltr", False)])  # fmt: skip
def test_alise_keeps_swapped_kv_in_int8(preset: str, int8: bool):
    """0.63 of the bytes; the device reads a 16-bit token (1 µs) and writes 0.63 of it, and the
    reverse."""
    [hardware] = RunSettings(choose(preset), (SWAPPING,)).effective_hardware
    assert (hardware != SWAPPING) == int8
    if int8:
        assert hardware.host_tokens == 10_000
        assert hardware.cost.offload_token_s == pytest.approx(0.63e-5)
        assert hardware.cost.upload_token_s == pytest.approx(1.26e-5)
        assert hardware.cost.quantize_token_s == pytest.approx(2 * 1.63e-6)
        assert hardware.with_int8_at_rest() is hardware  # charged already


# Room for batch sizes


def points(preset: str, kv_tokens: int, max_tokens: int) -> list[Point]:
    hardware = Hardware("hand", BY_HAND, kv_tokens=kv_tokens)
    made = RunSettings(choose(preset), (hardware,), max_tokens=max_tokens)
    return [Point({}, made, FOUR), Point({"rate": 1.0}, made, FOUR)]


def test_study_warns_once_of_a_batch_size_without_room():
    """3,072 KV tokens hold two requests of 30 + 1,024 tokens; a batch of 16 needs 16,864."""
    [warning] = describe_shortages(points("sls", 3_072, 1_024))
    assert "sls: 3,072 KV tokens hold 2 requests of 30 + 1,024 tokens" in warning
    assert "batch size of 16" in warning and "16,864 KV tokens" in warning


@pytest.mark.parametrize(
    ("preset", "kv_tokens"),
    [("sls", 16_864), ("so", 3_072), ("ab", 3_072), ("fcfs", 3_072), ("vs", 7_378)],
)
def test_study_with_room_for_the_batch_size_gives_no_warning(preset: str, kv_tokens: int):
    """`so` reserves 30 + 128 tokens each: 16 need 2,528."""
    assert describe_shortages(points(preset, kv_tokens, 1_024)) == []

"""The benchmark of scheduling rounds."""

from typing import Any

import pytest

from benchmarks.harness.rounds import PARTS, measure


@pytest.mark.parametrize(("policy", "anew"), [("mlfq", False), ("sls", False), ("sls", True)])
def test_parts_of_a_round_add_up(policy: str, anew: bool) -> None:
    """A preset for continuous batches, and one for static batches that end in each round."""
    scheduler, times = measure(policy, 8, 60, 3, anew)
    assert len(times.rounds_ms) == len(times.publish_ms) == len(times.report_us) == 3
    for round_ms, parts_ms in zip(times.rounds_ms, times.parts_ms, strict=True):
        assert len(parts_ms) == len(PARTS) and all(part >= 0 for part in parts_ms)
        assert sum(parts_ms) == pytest.approx(round_ms)
    assert 0 < scheduler.running <= 8 and len(scheduler.state.jobs) >= 60
    memory: Any = scheduler.state.rounds.memory
    assert bool(memory.notes.values) == scheduler.makes_batches

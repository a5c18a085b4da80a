"""The simulated figures of offline jobs and of batches beside other requests."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.offline.beside import measure
from benchmarks.offline.makespan import reorder
from services.policies.preset import presets
from simulator.engine.settings import RunSettings
from simulator.engine.simulation import simulate
from simulator.hardware.hardware_file import load_hardware
from simulator.workload.workload import Workload

JOB = Workload(
    "job",
    np.zeros(60),
    np.full(60, 32),
    np.where(np.arange(60) == 59, 400, 20),
    prompts=[str(row) for row in range(60)],
)


def test_long_answer_that_begins_first_shortens_the_job() -> None:
    settings = RunSettings(
        presets()["foretoken"], (load_hardware("h100-llama3-8b"),), predictor="oracle"
    )
    ends_s = [
        simulate(settings, reorder(JOB, rows, 4)).end_s
        for rows in (np.arange(60), np.argsort(-JOB.output_tokens, kind="stable"))
    ]
    assert ends_s[1] < 0.75 * ends_s[0]


@pytest.mark.parametrize("preset", ["foretoken", "fcfs"])
def test_batch_runs_beside_other_requests_until_they_end(preset: str) -> None:
    job = replace(JOB, output_tokens=np.full(60, 20))
    alone, beside = (measure(job, 10, 5.0, in_flight, preset, 0) for in_flight in (0, 4))
    assert alone["batch_tokens_per_s"] == 0 < beside["batch_tokens_per_s"]
    assert beside["ttft_s"] < 2 * alone["ttft_s"]

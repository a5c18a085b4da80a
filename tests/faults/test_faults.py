"""A short schedule of faults under load: every answer is right, or is a documented refusal. Ends
of all processes, one after another, refuse no request."""

import asyncio
from pathlib import Path

import pytest

from tests.faults.faults import FAULTS
from tests.faults.run import UNLIMITED, roll, run
from tests.faults.system import PROCESSES, running_system
from tests.faults.traffic import undisturbed_answers
from tests.faults.validation import Verdict

SEED = 1243  # ends the scheduler and a worker, stops both, and fails the connections to both
SECONDS, LONGEST_S = 25.0, 4.0  # until there has been a fault of every kind


@pytest.mark.slow
@pytest.mark.timeout(900)  # seven processes start, and most of them twice
async def test_answers_survive_faults_of_every_kind(tmp_path: Path) -> None:
    async with running_system(tmp_path) as system:
        expected = await undisturbed_answers(system.live.grpc)
        report = await run(system, expected, SEED, UNLIMITED, SECONDS, LONGEST_S)
        print(report)
        assert report.good, str(report)
        assert {kind.split()[0] for kind in report.faults} == set(FAULTS)
        few = range(0, len(expected), 4)
        afterwards = await undisturbed_answers(system.live.grpc, few)
        assert afterwards == {number: expected[number] for number in few}
        assert await asyncio.to_thread(system.live.stop) == 0  # it stops through the proxy
    assert "Traceback" not in system.output.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_rolling_restart_refuses_no_request(tmp_path: Path) -> None:
    async with running_system(tmp_path, "--gateways=2") as system:
        expected = await undisturbed_answers(system.live.grpc)
        report = await roll(system, expected, SEED)
        print(report)
        assert set(report.verdicts) == {Verdict.RIGHT, Verdict.CANCELLED}, str(report)
        assert report.faults.total() == len(PROCESSES) + 1  # the gateway is two
    assert "Traceback" not in system.output.read_text()

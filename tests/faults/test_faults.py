"""A short schedule of faults under load: every answer is right, or is a documented refusal. Ends
of all processes, one after another, refuse no request."""

import asyncio
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from foretoken.client.answers import Choice
from tests.faults.__main__ import main
from tests.faults.faults import FAULTS, no_writes
from tests.faults.run import UNLIMITED, roll, run
from tests.faults.system import PROCESSES, System, eventually, running_system
from tests.faults.traffic import undisturbed_answers
from tests.faults.validation import Verdict
from tests.live import Live
from tests.system.faults.killed_processes import metric

# Ends the scheduler and a worker, stops the other worker, fails the connections to all three, and
# fills the predictor's disk.
SEED = 13003
SECONDS, LONGEST_S, PAUSE_S = 25.0, 4.0, 2.0  # until there has been a fault of every kind
LOG_UNAVAILABLE = "the outcome log cannot be read or written"


@pytest.mark.slow
@pytest.mark.timeout(900)  # seven processes start, and most of them twice
async def test_answers_survive_faults_of_every_kind(tmp_path: Path) -> None:
    async with running_system(tmp_path) as system:
        expected = await undisturbed_answers(system.live.grpc)
        report = await run(system, expected, SEED, UNLIMITED, SECONDS, LONGEST_S, PAUSE_S)
        print(report)
        assert report.good, str(report)
        assert {kind.split()[0] for kind in report.faults} == set(FAULTS)
        await check_answers_with_full_disk(system, expected)
        assert await asyncio.to_thread(system.live.stop) == 0  # it stops through the proxy
    assert "Traceback" not in system.output.read_text()


async def check_answers_with_full_disk(
    system: System, expected: Mapping[int, Sequence[Choice]]
) -> None:
    """No process can write, and the answers are right. /health says so until outcomes are written
    again."""
    few = range(0, len(expected), 4)
    with no_writes([pid for name in PROCESSES for pid in system.pids(name)]):
        answers = await undisturbed_answers(system.live.grpc, few)
        assert answers == {number: expected[number] for number in few}
        await eventually(lambda: LOG_UNAVAILABLE in read_health(system.live))
        await eventually(lambda: metric(system.live, "foretoken_predictor_log_unavailable") == 1)
    await eventually(lambda: LOG_UNAVAILABLE not in read_health(system.live))
    await eventually(lambda: metric(system.live, "foretoken_predictor_log_pending") == 0)


def read_health(live: Live) -> str:
    with urllib.request.urlopen(f"{live.http}/health", timeout=10) as response:
        return str(response.read().decode())


@pytest.mark.slow
def test_run_that_does_not_start_ends_with_the_sentence_of_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tests.faults", "--wokers=3"])
    assert main() == 2
    sentence = "foretoken: unknown option --wokers, did you mean --workers?"
    assert capsys.readouterr().err == f"foretoken serve did not start: {sentence}\n"


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

"""`foretoken twin`, on the log of a simulated run and on that of a live one."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretoken import AsyncClient
from foretoken.__main__ import app
from simulator.engine.settings import Timing
from simulator.hardware.hardware_file import load_hardware, write_hardware
from tests.live import serving
from tests.simulator.fixtures import SMALL, random_workload, settings
from tests.simulator.twin.twin_fixtures import write_simulated


def figures(path: Path) -> dict[str, dict[str, float]]:
    return {row["figure"]: row for row in json.loads(path.read_text())["rows"]}


def test_command_writes_table_json_plot_and_hardware(tmp_path: Path):
    log, hardware = tmp_path / "events.log", tmp_path / "small.toml"
    hardware.write_text(write_hardware(SMALL))
    made = settings("fcfs", timing=Timing(round_job_s=0.0))
    write_simulated(log, made, random_workload(5, 60, 4.0))
    arguments = ["twin", str(log), "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path)]
    done = CliRunner().invoke(app, [*arguments, "--hardware", str(hardware)])
    assert done.exit_code == 0, done.output
    assert "events.log: fcfs, 60 requests, 1 worker" in done.output
    assert "left out" not in done.output
    assert figures(tmp_path / "rows.json")["makespan_s"]["error"] == pytest.approx(0, abs=1e-3)
    assert (tmp_path / "twin.png").stat().st_size > 10_000
    found = tmp_path / "found.toml"
    done = CliRunner().invoke(app, [*arguments, "--follow-speed", "--write-hardware", str(found)])
    assert done.exit_code == 0, done.output
    assert load_hardware(found).cost.base_s == pytest.approx(SMALL.cost.base_s, rel=1e-3)
    assert abs(figures(tmp_path / "rows.json")["makespan_s"]["error"]) < 1e-3


def test_goodput_is_judged_by_the_given_sla(tmp_path: Path):
    log = tmp_path / "events.log"
    write_simulated(log, settings("fcfs"), random_workload(5, 30, 4.0))
    arguments = ["twin", str(log), "--json", str(tmp_path / "rows.json"), "--sla", "ttft=1ms"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert figures(tmp_path / "rows.json")["goodput"]["measured"] == 0.0


@pytest.mark.slow
async def test_live_run_has_a_twin(tmp_path: Path):
    log = tmp_path / "events.log"
    with serving("--kv-tokens", "512", "--set", f"scheduler.event_log={log}") as live:
        async with AsyncClient(live.grpc) as client:
            calls = [
                client.complete(f"Count from 1 to {20 + i}.\n", max_tokens=200, temperature=0.0)
                for i in range(16)
            ]
            await asyncio.gather(*calls)
        assert live.stop() == 0
    arguments = ["twin", str(log), "--json", str(tmp_path / "rows.json")]
    done = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert done.exit_code == 0, done.output
    assert "16 requests" in done.output and "left out" not in done.output
    rows = figures(tmp_path / "rows.json")
    assert all(row["measured"] > 0 for name, row in rows.items() if "request_error" not in name)

"""The throughput line that a server under load prints every 10 s, with API keys required too."""

import time
from pathlib import Path

import pytest

from foretoken import Client
from foretoken.running.console.throughput import INTERVAL_S
from tests.live import serving

KEY = "sk-test"


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--separate"]])
def test_throughput_line_appears_under_load(tmp_path: Path, mode: list[str]) -> None:
    log = tmp_path / "stderr"
    with serving("--api-key", KEY, *mode, stderr=log) as live, Client(live.grpc, KEY) as client:
        until_s = time.monotonic() + 4 * INTERVAL_S
        while "generation " not in log.read_text():
            assert time.monotonic() < until_s, log.read_text()
            assert client.complete("Count from 1 to 90.\n", max_tokens=100).text
    line = next(line for line in log.read_text().splitlines() if "generation " in line)
    assert "goodput" in line, line
    assert float(line.split("generation ")[1].split()[0]) > 0, line

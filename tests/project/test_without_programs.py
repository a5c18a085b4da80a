"""Programs that no Python package brings: without them tests are skipped, and one line says why."""

import os
import subprocess
import sys
from pathlib import Path

from tests.live import ROOT

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]


def test_without_redis_server_one_line_says_what_to_install(tmp_path: Path):
    done = subprocess.run(
        [*PYTEST, "tests/runtime/outcomelog/test_redis.py"],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [said] = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert "redis-server is not installed" in said and "apt-get install redis-server" in said

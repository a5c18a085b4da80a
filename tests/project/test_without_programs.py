"""Tests with programs that are not installed are skipped with an install hint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import ROOT

pytestmark = pytest.mark.slow

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("redis-server", "tests/runtime/outcomelog/test_redis.py"),
        ("chromium", "tests/gateway/faces/ui/test_chat.py"),
    ],
)
def test_missing_program_skips_with_an_install_hint(tmp_path: Path, program: str, tests: str):
    done = subprocess.run(
        [*PYTEST, tests],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [message] = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert f"{program} is not installed" in message and f"apt-get install {program}" in message

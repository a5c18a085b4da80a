"""deploy/compose.yaml is valid, and what it says really runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy/compose.yaml"


def test_compose_follows_its_specification():
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, str(COMPOSE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mistake_in_compose_is_seen(tmp_path: Path):
    broken = tmp_path / "compose.yaml"
    broken.write_text(COMPOSE.read_text().replace("healthcheck:", "healthcheque:"))
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, str(broken)], capture_output=True, text=True)
    assert done.returncode == 1


@pytest.mark.slow
def test_every_service_runs_as_compose_says_and_answers():
    driver = [
        sys.executable,
        str(ROOT / "tests/project/compose_driver.py"),
        "Reverse: red blue green",
    ]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "--net", *driver],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["answer"]["choices"][0]["message"]["content"].strip() == "green blue red"
    assert set(said["exit_statuses"].values()) == {0}

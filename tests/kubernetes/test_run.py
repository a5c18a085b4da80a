"""The pods of the overlay `one-node` start in any order, answer, learn, and stop in time."""

import json
import subprocess
import sys

import pytest

from tests.kubernetes.resolved import ROOT, name, workloads


@pytest.mark.slow
def test_pods_of_one_node_start_and_answer(redis_program: str):
    driver = [sys.executable, "-m", "tests.kubernetes.driver", "Reverse: red blue green"]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "--net", *driver],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    message = json.loads(done.stdout.splitlines()[-1])
    assert message["answer"]["choices"][0]["message"]["content"].strip() == "green blue red"
    assert message["outcomes"] == 1
    names = {name(each) for each in workloads("one-node")}
    assert set(message["scraped"]) == names - {"redis"}
    assert message["exit_statuses"] == dict.fromkeys(names, 0)

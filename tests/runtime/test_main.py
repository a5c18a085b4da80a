"""The end of a service's process: message, log and exit status."""

import subprocess
import sys

SCRIPT = """
import logging
from services.runtime.main import exit_with_error
from services.runtime.telemetry.logs import configure_logging

configure_logging("worker", "INFO")
for _ in range(2):
    logging.warning("scheduler away")
exit_with_error("foretoken worker", {error})
"""


def run_and_exit(error: str) -> tuple[int, list[str]]:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(error=error)],
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode, process.stderr.splitlines()


def test_final_sentence_follows_pending_warnings():
    status, (first, again, sentence) = run_and_exit("ValueError('refused for good')")
    assert first.endswith("scheduler away") and again.endswith("scheduler away")
    assert (status, sentence) == (2, "foretoken worker: refused for good")


def test_unexpected_error_prints_a_traceback():
    status, lines = run_and_exit("RuntimeError('broken')")
    assert status == 1 and lines[-1] == "RuntimeError: broken"

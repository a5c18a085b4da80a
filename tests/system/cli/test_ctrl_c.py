"""Ctrl-C during the start, when idle and under load never prints a traceback."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foretoken import AsyncClient
from tests.live import MODES, ROOT, environment, serving, wait_for

PORTS = ("--http-port", "0", "--grpc-port", "0")

# Before this line the Python interpreter itself starts, and may lose the signal.
STARTED = "the interpreter has started"
COMMAND = (
    f"import runpy; print({STARTED!r}, flush=True); "
    "runpy.run_module('foretoken', run_name='__main__', alter_sys=True)"
)
MOMENTS_S = (0.3, 1.0, 2.0, 3.0, 4.0, 5.5, 7.0, 9.0, 12.0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["embedded", "gateways"])
def test_ctrl_c_at_any_moment_of_the_start(mode: str) -> None:
    """Status 130 before it is ready, 0 afterwards; no process remains."""
    for moment_s in MOMENTS_S:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "serve", *PORTS, *MODES[mode]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        assert process.stdout and process.stdout.readline().strip() == STARTED
        time.sleep(moment_s)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
        assert "Traceback" not in errors, errors
        assert process.returncode == (0 if "is ready" in printed else 130), errors
        assert _no_child_remains(process.pid)


def _no_child_remains(parent: int) -> bool:
    for folder in Path("/proc").iterdir():
        try:
            arguments = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if f"started_by={parent}".encode() in arguments:
            return False
    return True


@pytest.mark.slow
async def test_drain_reports_running_requests_and_second_signal_ends_it(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with serving(stderr=log) as live:
        async with AsyncClient(live.grpc) as client:
            streams = [
                client.generate("Count from 1 to 500.\n", max_tokens=1_900, ignore_eos=True)
                for _ in range(3)
            ]
            chunks = [aiter(stream) for stream in streams]
            for each in chunks:
                await anext(each)
            live.process.send_signal(signal.SIGINT)
            notice = "3 requests are still running; press Ctrl-C again to stop now"
            await asyncio.to_thread(wait_for, lambda: notice in log.read_text())
            assert live.process.poll() is None
            live.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(live.process.wait, 30) == 0
            for stream in streams:
                stream.cancel()
    assert "Traceback" not in log.read_text()

"""A worker that is stopped under load and goes on later: every answer is right."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from foretoken import AsyncClient
from tests.live import wait_for
from tests.system.faults.killed_processes import (
    PROMPTS,
    answers,
    check_answers_while,
    metric,
    pids,
    two_workers,
    wait_for_output,
)

HUNG = "it is suspected to hang"


@pytest.mark.slow
async def test_answers_survive_a_worker_that_hangs(tmp_path: Path) -> None:
    with two_workers(tmp_path, "--separate") as (live, output):
        async with AsyncClient(live.grpc) as client:
            expected = await answers(client)
        stopped, *_ = pids(live, "worker")

        async def stop_and_continue() -> None:
            os.kill(stopped, signal.SIGSTOP)
            try:
                await wait_for_output(output, HUNG)
                async with AsyncClient(live.grpc) as client:  # the other worker answers alone
                    assert await answers(client) == expected
            finally:
                os.kill(stopped, signal.SIGCONT)
            await wait_for_output(output, "is back")

        assert await check_answers_while(live, expected, stop_and_continue) >= len(PROMPTS)
        held = partial(metric, live, "foretoken_kv_blocks", 'state="held"')
        await asyncio.to_thread(wait_for, lambda: held() == 0)
        assert await asyncio.to_thread(metric, live, "foretoken_workers_suspected_total") >= 1
        assert live.stop() == 0
    assert "Traceback" not in output.read_text()

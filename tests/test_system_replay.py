"""A live run's event log, replayed through the same `step`, gives the same actions."""

import asyncio
from pathlib import Path

import pytest

from foretoken import AsyncClient
from services.policies.preset import choose
from services.scheduler.eventlog import read
from services.scheduler.events import Preempt, Round, SendPlan
from services.scheduler.state import SchedulerState
from tests.live import serving


@pytest.mark.slow
async def test_replay_gives_identical_actions(tmp_path: Path):
    log = tmp_path / "events.jsonl"
    with serving("--kv-tokens", "512", "--set", f"scheduler.event_log={log}") as live:
        async with AsyncClient(live.grpc) as client:
            asks = [
                client.complete(f"Count from 1 to {20 + i}.\n", max_tokens=200, temperature=0.0)
                for i in range(24)
            ]
            answers = await asyncio.gather(*asks)
            stream = client.generate("Count from 1 to 90.\n", max_tokens=300)
            chunks = aiter(stream)
            await anext(chunks)
            stream.cancel()
            await asyncio.sleep(0.3)
        assert len(answers) == 24
        assert live.stop() == 0
    state = SchedulerState(choose("past-future"))
    seen = []
    for number, entry in enumerate(read(log)):
        actions = state.step(entry.event, entry.now)
        assert actions == entry.actions, f"step {number}: {entry.event}"
        seen += [entry.event, *actions]
    kinds = {type(each) for each in seen}
    assert {Round, SendPlan} <= kinds
    assert len(seen) > 100


@pytest.mark.slow
async def test_an_aggressive_run_with_evictions_replays_too(tmp_path: Path):
    log = tmp_path / "events.jsonl"
    settings = ["--policy", "fcfs", "--kv-tokens", "512"]
    with serving(*settings, "--set", f"scheduler.event_log={log}") as live:
        async with AsyncClient(live.grpc) as client:
            asks = [
                client.complete(
                    f"Count from 1 to {20 + i}.\n",
                    max_tokens=120,
                    temperature=0.0,
                    ignore_eos=True,
                )
                for i in range(16)
            ]
            await asyncio.gather(*asks)
        assert live.stop() == 0
    state = SchedulerState(choose("fcfs"))
    preempted = 0
    for entry in read(log):
        actions = state.step(entry.event, entry.now)
        assert actions == entry.actions
        preempted += sum(isinstance(action, Preempt) for action in actions)
    assert preempted > 0

"""A live run's event log, replayed through the same `step`, gives the same actions."""

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest

from foretoken import AsyncClient
from services.core import (
    Completion,
    FinishReason,
    HeldRequest,
    Report,
    Request,
    WorkerView,
)
from services.forecast import certain
from services.policies.preset import choose
from services.scheduler.core.events import (
    Arranged,
    AskArrange,
    AskForecast,
    Displace,
    Event,
    Finish,
    Forecasted,
    Learn,
    Place,
    Preempt,
    Refuse,
    Reported,
    Resume,
    Round,
    SendPlan,
    Submitted,
    Tick,
    WorkerAttached,
    WorkerDecisionRow,
    WorkerLost,
)
from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.event_log import EventLog, Head, read, read_head
from tests.live import Live, serving, wait_for
from tests.system.children import paused_workers_of


def initial_state(log: Path) -> SchedulerState:
    """The state that the head of the log describes."""
    head = read_head(log)
    return SchedulerState(head.preset, head.limits, head.apart)


@pytest.mark.slow
async def test_replay_gives_identical_actions(tmp_path: Path):
    log = tmp_path / "events.jsonl"
    with serving("--kv-tokens", "512", "--set", f"scheduler.event_log={log}") as live:
        async with AsyncClient(live.grpc) as client:
            calls = [
                client.complete(f"Count from 1 to {20 + i}.\n", max_tokens=200, temperature=0.0)
                for i in range(24)
            ]
            answers = await asyncio.gather(*calls)
            stream = client.generate("Count from 1 to 90.\n", max_tokens=300)
            chunks = aiter(stream)
            await anext(chunks)
            stream.cancel()
            await asyncio.sleep(0.3)
        assert len(answers) == 24
        assert live.stop() == 0
    state = initial_state(log)
    seen = []
    for number, entry in enumerate(read(log)):
        actions = state.step(entry.event, entry.now)
        assert actions == entry.actions, f"step {number}: {entry.event}"
        seen += [entry.event, *actions]
    kinds = {type(each) for each in seen}
    assert {Round, SendPlan} <= kinds
    assert len(seen) > 100


def live_requests(live: Live) -> int:
    """The number of running and waiting requests."""
    with urllib.request.urlopen(f"{live.http}/load", timeout=10) as answer:
        return int(json.loads(answer.read())["server_load"])


@pytest.mark.slow
async def test_event_log_with_evictions_replays(tmp_path: Path):
    log = tmp_path / "events.jsonl"
    settings = ["--policy", "fcfs", "--kv-tokens", "512"]
    with serving(*settings, "--set", f"scheduler.event_log={log}") as live:
        async with AsyncClient(live.grpc) as client:
            with paused_workers_of(live):  # until all have arrived: most are admitted at once
                calls = [
                    asyncio.ensure_future(
                        client.complete(
                            f"Count from 1 to {20 + i}.\n",
                            max_tokens=120,
                            temperature=0.0,
                            ignore_eos=True,
                        )
                    )
                    for i in range(16)
                ]
                await asyncio.to_thread(wait_for, lambda: live_requests(live) == 16)
            await asyncio.gather(*calls)
        assert live.stop() == 0
    state = initial_state(log)
    preempted = 0
    for entry in read(log):
        actions = state.step(entry.event, entry.now)
        assert actions == entry.actions
        preempted += sum(isinstance(action, Preempt) for action in actions)
    assert preempted > 0


def test_event_log_of_every_event_replays(tmp_path: Path):
    """The log covers adoption, displacement, refusals, and a separate batcher that answers or does
    not answer."""
    view = WorkerView("w0", "unix:/w0", "demo", 1_000, 16, 4, 500)
    held = HeldRequest("a", 10, 50, 20, 30, 50, True, 2)
    known = Request("a", "demo", 10, 50, 0.0, delivered_tokens=3, worker_id="w0")
    state = SchedulerState(choose("alise"), apart=True)
    head = Head(state.preset, state.limits, apart=True)
    path = tmp_path / "events.jsonl"
    kinds: set[type] = set()
    with EventLog(path, 2**20, head) as log:
        now = 0.0

        def step(event: Event) -> None:
            nonlocal now
            now += 0.1
            actions = state.step(event, now)
            log.append(state.last_step)
            kinds.update(type(action) for action in actions)

        step(WorkerAttached("w0#1", view, (held,)))
        step(Submitted("g", known))
        step(WorkerAttached("w0#2", view, (held,)))
        for name, most in {"b": 40, "c": 30, "long": 600, "none": 0}.items():
            step(Submitted("g", Request(name, "demo", 10, most, 0.0, deadline_s=9.0)))
        step(Forecasted((("b", certain(40)), ("c", certain(30)))))
        step(Round())
        candidates = state.rounds.candidates
        assert candidates is not None
        [share] = state.rounds.arrange(candidates).workers
        run, limits = tuple(share.run.tolist()), tuple(share.limits.tolist())
        step(
            Arranged(
                candidates.round, (WorkerDecisionRow(share.worker, run, limits, (), run, 0.0),)
            )
        )
        step(Submitted("g", Request("d", "demo", 10, 50, 0.0)))
        step(Forecasted((("d", certain(50)),)))
        step(Round())
        step(Arranged(candidates.round + 1, None))
        done = (Completion("a", 50, FinishReason.LENGTH),)
        step(Reported("w0#2", "w0", Report(1, 2, finished=done)))
        step(WorkerLost("w0#2", "w0"))
        now = 9.0
        step(Tick())
    assert kinds >= {
        AskForecast, Resume, Displace, Preempt, Refuse, AskArrange, Place, SendPlan, Learn, Finish,
    }  # fmt: skip
    assert read_head(path) == head
    replayed = initial_state(path)
    for entry in read(path):
        assert replayed.step(entry.event, entry.now) == entry.actions

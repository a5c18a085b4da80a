"""The runner: failures, expiry, commands during a step, reports, drain and integrity checks."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.core import Completion, FinishReason, Grant, Pause, Plan, Report, Residency
from services.runtime.tasks import background
from services.worker.engine import loop, mailbox
from services.worker.engine import runner as runner_module
from services.worker.engine.loop import EngineLoop
from services.worker.engine.mailbox import (
    AddPrompt,
    ApplyPlan,
    AttachScheduler,
    DetachScheduler,
    RefuseRequest,
    ReturnReports,
)
from services.worker.engine.runner import EngineRunner
from services.worker.engine.step import Engine
from services.worker.metrics import WorkerMetrics
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.prompt import Prompt, SamplingParams
from tests.worker.worker_fixtures import engine_of, prompt_tokens

ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


class RecordedRunner:
    """A runner, and everything that it has posted."""

    def __init__(self) -> None:
        self.engine = engine_of("llama")
        engine = self.engine
        metrics = WorkerMetrics(
            CollectorRegistry(), engine.state, engine.phases, engine.host_block_bytes
        )
        self.runner = EngineRunner(
            partial(EngineLoop, self.engine, metrics), runner_module.engine_thread()
        )
        self.tokens: list[NewToken] = []
        self.errors: dict[str, tuple[int, str]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.runner.on_tokens = self.tokens.extend
        self.runner.on_error = self._error
        self.refusals: dict[str, str] = {}
        self.runner.on_refusal = lambda prompt, why: self.refusals.update({prompt.request_id: why})
        self.runner.on_report = self._report
        self._seq = 0
        self.runner.send(AttachScheduler(lambda _: None))

    def _error(self, prompt: Prompt, offset: int, why: str) -> None:
        self.errors[prompt.request_id] = (offset, why)

    def _report(self, report: Report) -> None:
        self.finished |= {f.request_id: f.reason for f in report.finished}

    def begin(self, *requests: tuple[str, tuple[int, ...], int]) -> None:
        """Sends all prompts and their plan."""
        for name, tokens, most in requests:
            self.runner.send(AddPrompt(Prompt(name, tokens, len(tokens), most, ENDLESS)))
        grants = tuple(Grant(name, most) for name, _, most in requests)
        self._seq += 1
        self.runner.send(ApplyPlan(Plan(self._seq, admit=grants)))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes steps with a 7 in the prompts fail."""
    run = Engine.run

    def run_or_break(engine: Engine, batch: Any) -> Any:
        if any(7 in sequence.prompt.token_ids for sequence in batch.sequences):
            raise RuntimeError("seven")
        return run(engine, batch)

    monkeypatch.setattr(Engine, "run", run_or_break)


async def test_faulty_request_gets_an_error_and_others_continue(poisoned):
    heard = RecordedRunner()
    async with background(heard.runner.run()):
        heard.begin(("a", (5, 6), 3), ("b", (5, 7), 3), ("c", (5, 8), 3))
        await until(lambda: len(heard.finished) == 3)
    assert heard.errors.keys() == {"b"}
    offset, why = heard.errors["b"]
    assert offset == 0 and why.startswith("the model failed on this request")
    assert heard.finished["b"] is FinishReason.ERROR
    reported = [(token.request_id, token.offset) for token in heard.tokens]
    assert sorted(reported) == [(name, offset) for name in "ac" for offset in range(3)]


async def test_impossible_request_is_refused_and_others_continue():
    heard = RecordedRunner()
    async with background(heard.runner.run()):
        heard.begin(("a", (5, 6), 3), ("b", (5, 7), 1_000_000))
        await until(lambda: len(heard.finished) == 2)
    assert heard.refusals.keys() == {"b"} and not heard.errors
    assert "the longest request that fits" in heard.refusals["b"]
    assert heard.finished["b"] is FinishReason.ERROR


async def test_many_choices_of_a_faulty_prompt_do_not_end_the_process(poisoned):
    """More than MAX_FAILURES requests fail one after another, but the device still computes."""
    heard = RecordedRunner()
    bad = [(f"bad{i}", (5, 7), 3) for i in range(2 * loop.MAX_FAILURES)]
    async with background(heard.runner.run()):
        heard.begin(*bad)
        await until(lambda: len(heard.errors) == len(bad))
        heard.begin(("good", (5, 6), 1))
        await until(lambda: "good" in heard.finished)
    assert heard.finished["good"] is FinishReason.LENGTH


async def test_broken_device_ends_the_process(
    monkeypatch,
):
    def fail(engine: Engine, batch: Any) -> Any:
        raise RuntimeError("always")

    monkeypatch.setattr(Engine, "run", fail)
    heard = RecordedRunner()
    heard.begin(*((f"r{i}", (5, 6), 3) for i in range(16)))
    with pytest.raises(RuntimeError, match="3 steps in a row failed"):
        async with asyncio.timeout(20):
            await heard.runner.run()
    assert len(heard.errors) == 3, "the gateways resubmit the others"


async def test_expired_prompts_and_admissions_are_dropped_while_others_run(monkeypatch):
    """A prompt that no plan admits and an admission without a prompt expire together."""
    monkeypatch.setattr(loop, "EXPIRE_INTERVAL_S", 0.0)
    heard = RecordedRunner()
    state = heard.engine.state
    heard.begin(("busy", prompt_tokens(1, 5), 200))
    state.pending.held_s = -1.0
    async with background(heard.runner.run()):
        await until(lambda: heard.tokens)
        heard.runner.send(AddPrompt(Prompt("orphan", (5, 6), 2, 3, ENDLESS)))
        heard.runner.send(ApplyPlan(Plan(2, admit=(Grant("absent", 3),))))
        await until(lambda: "absent" in heard.finished)
        assert not state.pending.prompts and not state.pending.admissions
        assert "busy" in state.running, "a busy worker expired it"
    assert heard.finished == {"absent": FinishReason.ERROR}


async def test_waiting_prompts_are_kept_until_they_expire(monkeypatch):
    monkeypatch.setattr(loop, "EXPIRE_INTERVAL_S", 0.0)
    heard = RecordedRunner()
    async with background(heard.runner.run()):
        heard.runner.send(AddPrompt(Prompt("early", (5, 6), 2, 3, ENDLESS)))
        heard.begin(("busy", prompt_tokens(1, 5), 20))
        await until(lambda: "busy" in heard.finished)
    assert "early" in heard.engine.state.pending.prompts


class Gate:
    """Holds a step until the gate opens, and records what each step computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.inside = threading.Event()
        self.open = threading.Event()
        self.steps: list[set[str]] = []
        run = Engine.run

        def held(engine: Engine, batch: Any) -> Any:
            self.steps.append({sequence.request_id for sequence in batch.sequences})
            self.inside.set()
            assert self.open.wait(20)
            return run(engine, batch)

        monkeypatch.setattr(Engine, "run", held)


async def test_commands_during_a_step_take_effect_in_the_next_one(monkeypatch):
    """64 prompts and their plan arrive while a step is held: the event loop continues, and the next
    step has all of them."""
    gate, heard = Gate(monkeypatch), RecordedRunner()
    async with background(heard.runner.run()):
        heard.begin(("first", (5, 6), 9))
        await until(gate.inside.is_set)
        many = [(f"r{i}", (5, 6, i), 2) for i in range(8, 72)]
        heard.begin(*many)
        await asyncio.wait_for(heard.runner.wait_for_room(), 5)
        assert len(gate.steps) == 1, "the step is still held"
        gate.open.set()
        await until(lambda: len(heard.finished) == 65)
    assert gate.steps[1] == {"first"} | {name for name, _, _ in many}


async def test_reader_waits_while_the_inbox_is_full(monkeypatch):
    monkeypatch.setattr(runner_module, "MAX_WAITING_COMMANDS", 3)
    gate, heard = Gate(monkeypatch), RecordedRunner()
    async with background(heard.runner.run()):
        heard.begin(("first", (5, 6), 2))
        await until(gate.inside.is_set)
        heard.runner.send(RefuseRequest("one"))
        await asyncio.wait_for(heard.runner.wait_for_room(), 5)
        for name in ("two", "three"):
            heard.runner.send(RefuseRequest(name))
        waiting = asyncio.ensure_future(heard.runner.wait_for_room())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        gate.open.set()
        await asyncio.wait_for(waiting, 20)
        await until(lambda: "three" in heard.finished)


async def test_reports_stop_before_detach_and_returned_ones_are_sent_again():
    heard = RecordedRunner()
    order: list[str] = []
    heard.runner.on_report = lambda report: order.extend(f.request_id for f in report.finished)
    unsent = Report(1, 0, finished=(Completion("lost", 3, FinishReason.STOP),))
    async with background(heard.runner.run()):
        heard.begin(("a", (5, 6), 2))
        await until(lambda: "a" in order)
        heard.runner.send(DetachScheduler(lambda: order.append("gone")))
        heard.runner.send(RefuseRequest("b"))
        heard.runner.send(ReturnReports((unsent,)))
        heard.runner.send(AttachScheduler(lambda held: order.append(f"greeted by {len(held)}")))
        await until(lambda: "b" in order)
    assert order == ["a", "gone", "greeted by 0", "lost", "b"]


async def test_engine_waits_for_a_blocked_event_loop(monkeypatch):
    """The number of pending calls is bounded, and none is lost."""
    monkeypatch.setattr(mailbox, "MAX_UNDELIVERED", 2)
    gate, heard = Gate(monkeypatch), RecordedRunner()
    gate.open.set()
    async with background(heard.runner.run()):
        heard.begin(("a", (5, 6), 50))
        await until(lambda: heard.tokens)
        time.sleep(0.4)  # noqa: ASYNC251 - blocks the loop, as load does
        ahead = len(gate.steps) - len(heard.tokens)
        assert ahead <= 2 + 2, "pending calls, the call in progress, and the step after it"
        await until(lambda: "a" in heard.finished)
    assert [token.offset for token in heard.tokens] == list(range(50))


async def test_drain_waits_for_the_last_request_and_the_inbox():
    heard = RecordedRunner()
    async with background(heard.runner.run()):
        heard.begin(("a", (5, 6), 30))
        await asyncio.wait_for(heard.runner.drain(), 20)
        assert heard.finished["a"] is FinishReason.LENGTH
        await asyncio.wait_for(heard.runner.drain(), 20)


async def test_drain_ignores_prompts_without_a_plan_and_paused_requests():
    heard = RecordedRunner()
    async with background(heard.runner.run()):
        heard.runner.send(AddPrompt(Prompt("unplanned", (5, 6), 2, 9, ENDLESS)))
        heard.runner.send(AddPrompt(Prompt("rests", (5, 6), 2, 50, ENDLESS)))
        heard.runner.send(ApplyPlan(Plan(1, admit=(Grant("rests", 3),))))
        await until(lambda: len(heard.tokens) == 3)
        heard.runner.send(ApplyPlan(Plan(2, pause=(Pause("rests", Residency.KEEP),))))
        await asyncio.wait_for(heard.runner.drain(), 20)
        assert heard.engine.state.pending.prompts and heard.engine.state.sequences


async def test_cancelled_runner_finishes_its_step_and_its_thread(monkeypatch):
    gate, heard = Gate(monkeypatch), RecordedRunner()
    running = asyncio.ensure_future(heard.runner.run())
    heard.begin(("a", (5, 6), 50))
    await until(gate.inside.is_set)
    running.cancel()
    await asyncio.sleep(0.05)
    assert not running.done(), "a step is still being computed"
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(gate.steps) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("engine")]


async def test_idle_worker_checks_its_integrity(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inconsistent state ends the engine when nothing runs."""
    monkeypatch.setattr(loop, "EXPIRE_INTERVAL_S", 0.01)
    heard = RecordedRunner()
    heard.engine.state.pool.grow("unknown", 16)
    with pytest.raises(AssertionError):
        await asyncio.wait_for(heard.runner.run(), 20)

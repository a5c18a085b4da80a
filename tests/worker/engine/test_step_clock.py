"""Step times by events of the device, reported when they have passed, without waiting."""

from random import Random
from typing import Any

import torch

from services.core import Grant, Plan, Report
from services.costs import StepTiming
from services.worker.engine import step_clock
from services.worker.engine.step import Engine
from services.worker.engine.step_clock import StepClock
from services.worker.kv.device_streams import ImmediateStreams, Lane
from services.worker.requests.types.batch import NO_INTS, DecodeRows, PrefillChunk, StepBatch
from services.worker.requests.types.prompt import Prompt, SamplingParams
from services.worker.requests.types.sequence import Sequence
from tests.worker.kv.deferred_streams import DeferredStreams
from tests.worker.worker_fixtures import engine_of, prompt_tokens

ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
PROMPT = Prompt("r", (1,) * 9, 9, 1)


def slow_device() -> DeferredStreams:
    """A device that computes only when it is awaited."""
    return DeferredStreams(Random(0), haste=(0.0,))


class OnDevice:
    """An engine on a slow device: one operation per token; a draw waits for it."""

    def __init__(self, monkeypatch: Any) -> None:
        self.streams = slow_device()
        self.engine = engine_of("llama", max_batch_tokens=16, report_every_steps=1)
        self.engine._clock = StepClock(self.streams)
        self.reports: list[Report] = []
        run = Engine.run

        def issue(engine: Engine, batch: StepBatch) -> torch.Tensor:
            for _ in range(batch.prefill_tokens + len(batch.decodes)):
                self.streams.issue(Lane.COMPUTE, "", lambda: None)
            if batch.sampling:
                self.streams.finish_all()
            return run(engine, batch)

        monkeypatch.setattr(Engine, "run", issue)

    def step(self) -> list[StepTiming]:
        result = self.engine.step()
        assert result is not None
        if report := self.engine.state.report():
            self.reports.append(report)
        return result.timings


def test_step_without_draws_is_timed_by_its_events(monkeypatch):
    """40 tokens in chunks of 16, 16 and 8; the first two chunks only launch. An operation takes 1
    s, and so does an event. Each time is reported with a later step, also to the scheduler."""
    device = OnDevice(monkeypatch)
    device.engine.add(Prompt("r", prompt_tokens(1, 40), 40, 9, ENDLESS), 0.0)
    device.engine.state.apply_plan(Plan(1, admit=(Grant("r", 9),)), 0.0)
    assert device.step() == []
    assert device.step() == [], "nothing waited for the step"
    chunks = [StepTiming(16, 0, 16, 17.0), StepTiming(16, 0, 32, 17.0)]
    assert device.step() == chunks, "the third is complete, but its event was not queried yet"
    assert device.step() == [StepTiming(8, 0, 40, 9.0)]
    device.streams.finish_all()
    assert device.step() == [StepTiming(0, 1, 40, 2.0)]
    reported = [timing for report in device.reports for timing in report.timings]
    assert [timing.prefill_tokens for timing in reported] == [16, 16, 8, 0] and reported[
        :2
    ] == chunks


def test_step_time_is_immediate_on_a_cpu():
    engine = engine_of("llama")
    engine.add(Prompt("r", prompt_tokens(1, 5), 5, 2, ENDLESS), 0.0)
    engine.state.apply_plan(Plan(1, admit=(Grant("r", 2),)), 0.0)
    first, second = engine.step(), engine.step()
    assert first is not None and second is not None
    shapes = [(t.prefill_tokens, t.decode_seqs, t.context_tokens) for t in first.timings]
    assert shapes == [(5, 0, 5)] and len(second.timings) == 1
    assert first.timings[0].elapsed_s > 0


def prefill(tokens: int) -> StepBatch:
    chunk = PrefillChunk(Sequence.start(PROMPT, 1), 0, tokens, NO_INTS)
    return StepBatch(DecodeRows([], [], 4), [chunk])


def test_failed_step_has_no_time():
    clock = StepClock(ImmediateStreams())
    clock.begin(prefill(3))
    assert clock.pop_completed() == []
    clock.end(clock.begin(prefill(3)))
    assert [t.prefill_tokens for t in clock.pop_completed()] == [3]


def test_unread_step_times_are_bounded(monkeypatch):
    monkeypatch.setattr(step_clock, "MAX_PENDING", 2)
    streams = slow_device()
    clock = StepClock(streams)
    for tokens in (1, 2, 3):
        clock.end(clock.begin(prefill(tokens)))
    assert clock.pop_completed() == []
    streams.finish_all()
    assert [timing.prefill_tokens for timing in clock.pop_completed()] == [2, 3]
    assert clock.pop_completed() == []

"""A real worker, with an engine that is busy, hangs or fails."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.generated import common_pb2
from services.worker.engine.step import Engine
from tests.observability.lines import lines_of
from tests.worker.worker_fixtures import prompt_tokens
from tests.worker.worker_serving import Prompt, running, until


async def test_worker_is_silent_while_its_engine_hangs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event loop goes on, and says so to health checks; the scheduler suspects it by its
    silence. It speaks again once a step ends."""
    hangs, goes_on = threading.Event(), threading.Event()
    run = Engine.run

    def hang(engine: Engine, batch: Any) -> Any:
        hangs.set()
        goes_on.wait(60)
        return run(engine, batch)

    async with running(folder, heartbeat_s=0.02, hang_s=0.1) as world:
        scheduler, gateway = world.scheduler, world.gateway()
        await until(lambda: scheduler.beats > 2)
        monkeypatch.setattr(Engine, "run", hang)
        try:
            gateway.send("r", prompt_tokens(1, 5), 3, ignore_eos=True)
            scheduler.admit("r")
            await until(hangs.is_set)
            before = -1
            async with asyncio.timeout(30):
                while scheduler.beats > before:
                    before = scheduler.beats
                    await asyncio.sleep(0.3)
        finally:
            goes_on.set()
        await until(lambda: scheduler.beats > before and gateway.ended)


async def test_health_check_is_answered_while_the_engine_is_busy(folder):
    async with running(folder) as world:
        gateway = world.gateway()
        gateway.send("r", prompt_tokens(1, 5), 240, ignore_eos=True)
        world.scheduler.admit("r")
        await until(lambda: gateway.tokens["r"])
        stub = cast(Any, health_pb2_grpc.HealthStub(world.channel))
        await stub.Check(health_pb2.HealthCheckRequest())
        assert "r" not in gateway.ended
        await until(lambda: "r" in gateway.ended)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (Prompt(token_ids=[5, 96], prompt_tokens=2, max_tokens=4), "token_ids must lie in"),
        (Prompt(token_ids=[5], prompt_tokens=2, max_tokens=4), "prompt_tokens must lie in"),
        (Prompt(token_ids=[5], prompt_tokens=1, max_tokens=256), "prompt (1) + max_tokens (256)"),
        (Prompt(token_ids=[5], prompt_tokens=1, max_tokens=0), "max_tokens must be at least 1"),
        (Prompt(prompt_tokens=0, max_tokens=4), "prompt_tokens must lie in [1, 0]"),
        (Prompt(token_ids=[5], prompt_tokens=1, max_tokens=4,
                sampling=common_pb2.Sampling(top_p=float("nan"))), "top_p must lie in"),
    ],
    ids=("token", "length", "reach", "nothing", "empty", "nan"),
)  # fmt: skip
async def test_prompt_that_cannot_run_ends_alone_with_a_sentence(folder, prompt, sentence):
    async with running(folder) as world:
        gateway = world.gateway()
        prompt.request_id = "bad"
        gateway.send_raw(prompt)
        gateway.send("good", prompt_tokens(2, 5), 3, ignore_eos=True)
        world.scheduler.admit("good")
        await until(lambda: len(gateway.ended) == 2 and len(world.scheduler.finished) == 2)
    assert gateway.ended["bad"].finish_reason == common_pb2.FINISH_REASON_ERROR
    assert gateway.ended["bad"].refused and sentence in gateway.ended["bad"].message
    assert world.scheduler.finished["bad"] == common_pb2.FINISH_REASON_ERROR


async def test_failed_step_ends_its_requests_and_later_ones_run(folder, monkeypatch):
    run = Engine.run

    def break_on_seven(engine: Engine, batch: Any) -> Any:
        if any(7 in chunk.sequence.tokens for chunk in batch.chunks):
            raise RuntimeError("seven")
        return run(engine, batch)

    monkeypatch.setattr(Engine, "run", break_on_seven)
    async with running(folder) as world:
        gateway = world.gateway()
        with lines_of("services.worker.engine.loop") as lines:
            for request_id, tokens in (("broken", (5, 7, 5)), ("whole", (5, 6, 5))):
                traced = f"00-{'ab' * 16}-{'cd' * 8}-01"
                gateway.send(request_id, tokens, 3, traced, ignore_eos=True)
                world.scheduler.admit(request_id)
                await until(lambda: request_id in gateway.ended)  # noqa: B023 - it is awaited here
            [line] = lines()
        await world.free_again()
    assert (line["request_id"], line["trace_id"]) == ("broken", "ab" * 16)
    assert "RuntimeError: seven" in line["exception"]
    assert "the model failed" in gateway.ended["broken"].message
    assert not gateway.ended["broken"].refused
    assert len(gateway.tokens["whole"]) == 3
    assert world.scheduler.finished["broken"] == common_pb2.FINISH_REASON_ERROR


async def test_model_that_keeps_failing_ends_the_process(folder, monkeypatch):
    def fail(engine: Engine, batch: Any) -> Any:
        raise RuntimeError("always")

    with pytest.raises(ExceptionGroup) as failed:
        async with running(folder) as world:
            monkeypatch.setattr(Engine, "run", fail)
            gateway = world.gateway()
            for number in range(3):
                gateway.send(f"r{number}", (5, 6), 3)
                world.scheduler.admit(f"r{number}")
                await until(lambda: f"r{number}" in gateway.ended)  # noqa: B023 - it is awaited here
    assert "3 steps in a row failed" in repr(failed.value)

"""A real worker on a Unix socket between a recording scheduler and recording gateways."""

import asyncio
import gc
import logging
import re
from pathlib import Path
from typing import Any, cast

import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from llguidance import LLMatcher
from prometheus_client import CollectorRegistry

from foretoken.running.options import demo_model
from observability.tracing import OFF
from protos.generated import common_pb2, worker_pb2, worker_pb2_grpc
from services.core import Grant, HeldRequest, StaticBatch
from services.runtime.codecs.attach import decode_held
from services.runtime.errors import Code, ServiceError
from services.runtime.network.backoff import Backoff
from services.runtime.tasks import background
from services.worker.__main__ import build
from services.worker.config import WorkerConfig
from tests.observability.lines import lines_of
from tests.worker.engine.grammar_cases import asked, ids_of, text_of
from tests.worker.worker_fixtures import generate, prompt_tokens
from tests.worker.worker_serving import KV_TOKENS, Prompt, RecordingScheduler, running, until


async def test_worker_sends_its_hello(folder):
    async with running(folder) as world:
        hello = world.scheduler.hellos[0]
        stub = cast(Any, health_pb2_grpc.HealthStub(world.channel))
        request = health_pb2.HealthCheckRequest(service="foretoken.v1.Worker")
        health = await stub.Check(request)
    assert (hello.worker_id, hello.address, hello.model) == ("w", world.address, "small")
    assert (hello.kv_tokens, hello.block_tokens, hello.max_context_tokens) == (512, 16, 256)
    assert hello.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4  # layers, k and v, heads, dim, float32
    assert hello.profile and all(timing.elapsed_s > 0 for timing in hello.profile)
    took = r"imports \S+ s, model \S+ s, kernels (loaded|compiled) \S+ s, profile \S+ s"
    assert re.fullmatch(took, hello.start)
    assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_tokens_stream_and_the_end_is_reported_to_both_sides(folder):
    prompts = {f"r{i}": prompt_tokens(i, 3 + 9 * i) for i in range(5)}
    async with running(folder, max_batch_tokens=16) as world:
        gateway = world.gateway()
        world.scheduler.admit("r0", "r1")  # before their prompts
        for request_id, tokens in prompts.items():
            gateway.send(request_id, tokens, 12, ignore_eos=True)
        await asyncio.sleep(0.05)
        world.scheduler.admit("r2", "r3", "r4")
        await until(lambda: len(gateway.ended) == 5)
        await until(lambda: len(world.scheduler.finished) == 5)
        await world.free_again()
    assert set(world.scheduler.finished.values()) == {common_pb2.FINISH_REASON_LENGTH}
    for request_id, tokens in prompts.items():
        answer, _ = generate("llama", tokens, 12)
        if 0 not in answer:
            assert gateway.tokens[request_id] == answer
        assert len(gateway.tokens[request_id]) == 12
    seqs = [report.seq for report in world.scheduler.reports]
    assert seqs == list(range(1, len(seqs) + 1))
    assert sum(len(report.timings) for report in world.scheduler.reports) >= 12


async def test_plan_with_a_number_that_does_not_ascend_ends_the_stream(folder):
    async with running(folder) as world:
        scheduler, labels = world.scheduler, {"method": "Attach", "field": "plan.seq"}
        scheduler.seq = 5
        scheduler.plan()
        scheduler.seq = 1
        scheduler.plan()
        await until(lambda: len(scheduler.hellos) == 2)
        counted = "foretoken_worker_invalid_messages_total"
        assert world.registry.get_sample_value(counted, labels) == 1
        scheduler.plan()
        await until(lambda: scheduler.reports[-1:] and scheduler.reports[-1].applied_plan_seq == 1)


async def test_named_tokens_and_scored_prompts(folder):
    """Options that name tokens, and prompt scores, over the wire; an invalid id is an error with a
    sentence."""
    tokens = prompt_tokens(1, 40)
    async with running(folder) as world:
        gateway = world.gateway()

        async def ended(request_id: str, **sampling: Any) -> worker_pb2.RequestTokens:
            gateway.send(request_id, tokens, 12, ignore_eos=True, **sampling)
            world.scheduler.admit(request_id)
            await until(lambda: request_id in gateway.ended)
            return gateway.ended[request_id]

        await ended("plain")
        last = await ended("stops", stop_token_ids=[gateway.tokens["plain"][3]])
        await ended("scored", prompt_logprobs=2)
        masks = {"allowed_token_ids": [5, 6, 7], "logit_bias": {5: 100.0}}
        bad = [common_pb2.TokenIds(ids=[5, 5]), common_pb2.TokenIds(ids=[5, 6])]
        await ended("masked", bad_tokens=bad, **masks)
        refused = await ended("refused", logit_bias={96: 1.0})
    assert last.finish_reason == common_pb2.FINISH_REASON_STOP
    plain = gateway.tokens["plain"]
    assert gateway.tokens["stops"] == plain[: plain.index(plain[3]) + 1]
    found = {name: first.cached_tokens for name, first in gateway.first.items()}
    assert (found["plain"], found["stops"], found["scored"]) == (0, 32, 0)
    scores = gateway.first["scored"].prompt_logprobs
    assert [score.token_id for score in scores] == [*tokens[1:]]
    assert {len(score.top_ids) for score in scores} == {2}
    assert max(score.logprob - score.top_logprobs[0] for score in scores) <= 0
    assert not gateway.first["plain"].prompt_logprobs
    assert gateway.tokens["masked"] == [5, 7] * 6
    assert refused.refused and refused.message == "logit_bias must lie in [0, 96)"


async def test_grammars_over_the_wire():
    """Prompts arrive before and after their admission, and wait for their grammars; one has no
    valid grammar, and one cannot go on with it."""
    regex = LLMatcher.grammar_from_regex
    how: dict[str, dict[str, Any]] = {
        "number": {"grammar": regex("[0-9]{3}")},
        "word": {"grammar": regex("(red|green) (apple|pear)"), "temperature": 2.0, "seed": 4},
        "again": {"grammar": regex("[0-9]{3}")},
        "plain": {},
        "invalid": {"grammar": "{nonsense"},
        "long": {"grammar": "x" * (2**20 + 1)},
        "stuck": {"grammar": regex("[0-9]{3}x"), "allowed_token_ids": ids_of("0123456789")},
    }
    async with running(Path(demo_model()), dtype="float32") as world:
        gateway = world.gateway()
        world.scheduler.admit("number", "word", "stuck")
        for name, sampling in how.items():
            gateway.send(name, asked("Count from 3 to 6."), 30, **sampling)
        await asyncio.sleep(0.05)
        world.scheduler.admit("again", "plain", "invalid", "long")
        await until(lambda: gateway.ended.keys() == how.keys())
        await world.free_again()
    texts = {name: text_of(gateway.tokens[name]) for name in how}
    assert re.fullmatch("[0-9]{3}", texts["number"]) and texts["again"] == texts["number"]
    assert re.fullmatch("(red|green) (apple|pear)", texts["word"])
    assert texts["plain"] == "3 4 5 6"
    messages = {name: gateway.ended[name] for name in ("invalid", "long", "stuck")}
    assert [messages[name].refused for name in messages] == [True, True, False]
    assert "the schema or grammar cannot be used: " in messages["invalid"].message
    assert "grammar must have at most" in messages["long"].message
    assert "no token that the request allows" in messages["stuck"].message
    assert re.fullmatch("[0-9]{3}", texts["stuck"])


async def test_cancel_ends_a_running_request_and_frees_its_blocks(folder):
    async with running(folder) as world:
        gateway = world.gateway()
        gateway.send("r", prompt_tokens(1, 5), 240, ignore_eos=True)
        world.scheduler.admit("r")
        await until(lambda: len(gateway.tokens["r"]) > 5)
        world.scheduler.plan(cancel=("r",))
        await world.free_again()
        drawn = len(gateway.tokens["r"])
        assert drawn < 240 and "r" not in world.scheduler.finished
        gateway.send("next", prompt_tokens(2, 5), 3, ignore_eos=True)
        world.scheduler.admit("next")
        await until(lambda: "next" in gateway.ended)
    assert not gateway.ended.keys() - {"next"}


async def test_closed_gateway_stream_does_not_affect_another(folder):
    async with running(folder) as world:
        leaver, stayer = world.gateway("leaver"), world.gateway("stayer")
        leaver.send("a", prompt_tokens(1, 5), 200, ignore_eos=True)
        stayer.send("b", prompt_tokens(2, 5), 200, ignore_eos=True)
        world.scheduler.admit("a", "b")
        await until(lambda: leaver.tokens["a"] and stayer.tokens["b"])
        leaver.leave()
        world.scheduler.plan(cancel=("a",))
        await until(lambda: "b" in stayer.ended)
        await world.free_again()
    assert len(stayer.tokens["b"]) == 200 and not stayer.tokens.keys() - {"b"}


async def test_worker_reattaches_with_a_hello_that_lists_held_requests(folder):
    async with running(folder) as world:
        gateway = world.gateway()
        gateway.send("r", prompt_tokens(1, 5), 200, ignore_eos=True)
        gateway.send("early", prompt_tokens(2, 7), 9, ignore_eos=True)
        world.scheduler.admit("r", limit=10)
        await until(lambda: len(gateway.tokens["r"]) == 10)
        world.scheduler.hang_up()
        await until(lambda: len(world.scheduler.hellos) == 2)
        assert not world.scheduler.hellos[0].held
        assert decode_held(world.scheduler.hellos[1]) == (
            HeldRequest("r", 5, 200, 10, 14, limit_tokens=10, running=True, blocks=1),
            HeldRequest("early", 7, 9, 0, 0, limit_tokens=0, running=False, blocks=0),
        )
        world.scheduler.plan(cancel=("early",), admit=(Grant("r", 20),))
        await until(lambda: len(gateway.tokens["r"]) == 20)
        world.scheduler.plan(cancel=("r",))
        await world.free_again()
        assert len(gateway.tokens["r"]) == 20 and not gateway.tokens["early"]


async def refuse(scheduler: RecordingScheduler, attempt: int) -> None:
    await until(lambda: len(scheduler.hellos) > attempt)
    scheduler.hang_up(ServiceError(Code.UNAUTHENTICATED, "no token"))


async def test_refused_worker_waits_longer_before_each_attempt(folder, monkeypatch):
    failures: list[int] = []

    def after_s(_: Backoff, failed: int) -> float:
        failures.append(failed)
        return 0.001

    monkeypatch.setattr(Backoff, "after_s", after_s)
    async with running(folder) as world:
        for attempt in range(4):
            await refuse(world.scheduler, attempt)
        await until(lambda: world.scheduler.hellos[4:])
        world.scheduler.plan()
        await until(lambda: any(each.applied_plan_seq for each in world.scheduler.reports))
        world.scheduler.hang_up()
        await until(lambda: len(failures) == 5)
    assert failures == [1, 2, 3, 4, 0]


async def test_ended_member_is_reported_when_the_last_of_its_batch_is_cancelled(folder):
    """The end comes between two steps, when nothing is left to compute."""
    async with running(folder) as world:
        gateway = world.gateway()
        gateway.send("short", prompt_tokens(1, 5), 3, ignore_eos=True)
        gateway.send("long", prompt_tokens(2, 9), 240, ignore_eos=True)
        grants = (Grant("short", 3), Grant("long", 240))
        batch = StaticBatch(1, ("short", "long"))
        world.scheduler.plan(admit=grants, batches=(batch,))
        await until(lambda: len(gateway.tokens["long"]) > 8)
        assert len(gateway.tokens["short"]) == 2 and not gateway.ended
        world.scheduler.plan(cancel=("long",))
        await until(lambda: "short" in gateway.ended and "short" in world.scheduler.finished)
        assert len(gateway.tokens["short"]) == 3
        assert world.scheduler.reports[-1].free_blocks == KV_TOKENS // 16


async def test_returning_prompt_restarts_after_the_cancel_of_its_first_placement(folder):
    """The next scheduler places the requests of its worker again: prompt and cancel arrive in
    either order."""
    async with running(folder) as world:
        gateway = world.gateway()
        gateway.send("r", prompt_tokens(1, 5), 200, ignore_eos=True)
        world.scheduler.admit("r", limit=10)
        await until(lambda: len(gateway.tokens["r"]) == 10)
        world.scheduler.hang_up()
        await until(lambda: len(world.scheduler.hellos) == 2)
        world.scheduler.plan(cancel=("r",))
        again = prompt_tokens(1, 5) + tuple(gateway.tokens["r"])
        resumed = Prompt(request_id="r", token_ids=again, prompt_tokens=5, max_tokens=12,
                         sampling=common_pb2.Sampling(temperature=0, ignore_eos=True))  # fmt: skip
        gateway.send_raw(resumed)
        world.scheduler.admit("r")
        await until(lambda: "r" in gateway.ended)
        await world.free_again()
    assert len(gateway.tokens["r"]) == 12


async def test_closed_gateway_s_requests_are_dropped_without_a_scheduler(folder):
    async with running(folder) as world:
        leaver, stayer = world.gateway("leaver"), world.gateway("stayer")
        leaver.send("a", prompt_tokens(1, 5), 200, ignore_eos=True)
        stayer.send("b", prompt_tokens(2, 5), 200, ignore_eos=True)
        world.scheduler.admit("a", "b", limit=10)
        await until(lambda: len(leaver.tokens["a"]) == len(stayer.tokens["b"]) == 10)
        leaver.leave()
        await asyncio.sleep(0.1)  # the worker has detected the loss
        world.scheduler.hang_up()
        await until(lambda: len(world.scheduler.hellos) == 2)
        held = decode_held(world.scheduler.hellos[1])
    assert [request.request_id for request in held] == ["b"]


async def test_plans_with_an_unknown_residency_are_applied_and_logged_once(folder, caplog):
    async with running(folder) as world:
        gateway = world.gateway()
        gateway.send("r", prompt_tokens(1, 5), 10, ignore_eos=True)
        world.scheduler.plan(admit=(Grant("r", 5),), residency="levitate")
        world.scheduler.plan(extend=(Grant("r", 10),), residency="levitate")
        await until(lambda: "r" in gateway.ended)
    stated = [r.getMessage() for r in caplog.records if "levitate" in r.getMessage()]
    assert stated == [
        "the scheduler's plan names the residency policy 'levitate', which this worker does not "
        "have; it uses recompute"
    ]


async def test_stream_without_a_hello_is_an_error(folder):
    async with running(folder) as world:
        call = worker_pb2_grpc.WorkerStub(world.channel).Stream(
            iter([worker_pb2.WorkerInput(prompt=Prompt(request_id="r"))])
        )
        with pytest.raises(aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is StatusCode.INVALID_ARGUMENT


async def test_failed_attempts_to_attach_leave_no_task_behind(folder, tmp_path):
    """gRPC does not end the writer of a call that could not connect."""
    faults: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: faults.append(told["message"]))
    config = WorkerConfig(
        worker_id="w", address=f"unix:{tmp_path}/worker", scheduler_address=f"unix:{tmp_path}/none",
        model=str(folder), kv_tokens=256, profile_s=0.05,
    )  # fmt: skip
    unit = build(config, CollectorRegistry(), OFF)
    with lines_of("services.worker.attachment", logging.DEBUG) as lines:
        async with background(unit.run()):
            await until(lines)
            await asyncio.sleep(0.5)  # about three attempts
            gc.collect()
            await asyncio.sleep(0)
            gc.collect()
            await asyncio.sleep(0)
    assert not faults

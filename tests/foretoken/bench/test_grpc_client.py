"""The benchmark's gRPC client, against a gateway on a real socket."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from foretoken.bench.grpc_client import GrpcServer, GrpcWriter
from foretoken.bench.prompts import Prompt
from foretoken.bench.samples import STOPPED, TIMED_OUT, Sample
from foretoken.bench.served import ServedModel, find_model
from protos.generated import scheduler_pb2 as sched
from protos.generated.worker_pb2 import Prompt as WorkerPrompt
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of

WRITER = GrpcWriter("demo")
TURNS = [{"role": "user", "content": "1,"}]


def answer(_: WorkerPrompt) -> Sequence[int]:
    return tokens_of("four")


@pytest.fixture
async def house() -> AsyncIterator[Harness]:
    async with run_harness(answer) as made:
        yield made


@pytest.fixture
async def server(house: Harness) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(f"grpc://{house.grpc_address}")
    yield server
    await server.close()


async def measure(
    server: GrpcServer, prompt: Prompt, sla: str = "", timeout_s: float = 20.0
) -> Sample:
    sample = Sample(0.0, sla)
    await server.stream(*WRITER.body(prompt), sample, 0.0, timeout_s)
    return sample


@pytest.mark.parametrize("prompt", [Prompt("1,", (), 9), Prompt(None, TURNS, 9)])
async def test_grpc_client_records_an_answer(
    house: Harness, server: GrpcServer, prompt: Prompt
) -> None:
    sample = await measure(server, prompt, "interactive")
    assert (sample.problem, sample.finish_reason, sample.has_usage) == ("", "stop", True)
    assert sample.output_tokens == len(tokens_of("four")) and sample.prompt_tokens > 1
    assert 0 < sample.sent_s <= sample.text_s[0] <= sample.text_s[-1] <= sample.end_s
    assert house.scheduler.requests[-1].sla.name == "interactive"
    assert house.scheduler.requests[-1].max_tokens == 9


async def test_grpc_client_records_each_failure(house: Harness, server: GrpcServer) -> None:
    full = sched.Rejected(reason=sched.REJECT_REASON_QUEUE_FULL, message="queue is full")
    house.scheduler.answers = lambda _: sched.RequestEvent(rejected=full)
    assert "queue is full" in (await measure(server, Prompt("1,"))).problem
    house.scheduler.answers, house.scheduler.place = lambda _: None, False
    assert (await measure(server, Prompt("1,"), timeout_s=0.1)).problem == TIMED_OUT
    sample = Sample(0.0)
    task = asyncio.create_task(server.stream(*WRITER.body(Prompt("1,")), sample, 0.0))
    await house.until(lambda: len(house.scheduler.requests) == 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sample.problem == STOPPED


async def test_grpc_client_finds_the_served_model(server: GrpcServer) -> None:
    assert await find_model(server) == ServedModel("demo", "foretoken")
    with pytest.raises(ValueError, match="does not serve 'other'; it serves demo"):
        await find_model(server, "other")


async def test_unreachable_grpc_server_is_reported_in_one_sentence() -> None:
    server = GrpcServer("grpc://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"no server answers at 127\.0\.0\.1:1"):
        await find_model(server)
    await server.close()


def test_writer_rejects_messages_that_are_not_text() -> None:
    image = [{"role": "user", "content": [{"type": "image_url"}]}]
    with pytest.raises(ValueError, match="cannot be sent over gRPC"):
        WRITER.body(Prompt(None, image))  # type: ignore[arg-type]  # a wrong type on purpose

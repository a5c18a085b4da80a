"""Each server of a deployment with its real servicer on a socket, and valid messages to it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry, Gauge

from observability.exposition import Part
from protos.generated import (
    batcher_pb2_grpc,
    common_pb2,
    estimator_pb2,
    estimator_pb2_grpc,
    ext_proc_pb2,
    ext_proc_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    predictor_pb2,
    scheduler_pb2,
    telemetry_pb2,
    worker_pb2,
)
from services.estimator.config import EstimatorConfig
from services.estimator.service import EstimatorService
from services.picker.config import PickerConfig
from services.picker.service import PickerService
from services.policies.preset import choose
from services.runtime.codecs.arrange import encode_hello
from services.runtime.network.channel import connect
from services.runtime.tasks import background
from services.runtime.telemetry.scrape import metrics_over_http
from tests.batcher import arranging
from tests.gateway.gateway_fakes import demo_text, run_harness
from tests.picker.test_exchange import (
    BODY,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.predictor import predictor_serving as predicting
from tests.reach import reaching, until
from tests.scheduler import served as scheduling
from tests.worker import worker_serving as working

PACKAGE = "foretoken.v1"
ANSWER = demo_text().encode("one two three")
Conversation = Sequence[Message | bytes]  # one message, or those of a stream


@dataclass(frozen=True)
class Target:
    """A server, a valid conversation for each of its methods, and what prepares one. `serves`
    raises an error unless a valid call is answered."""

    channel: aio.Channel
    conversations: Mapping[str, Conversation]
    serves: Callable[[], Awaitable[None]]
    prepare: Callable[[Conversation], None] = lambda _: None

    def conversation(self, method: str) -> Conversation:
        return {**self.conversations, **COMMON}[method]


COMMON: Mapping[str, Conversation] = {
    f"/{PACKAGE}.Telemetry/Scrape": [telemetry_pb2.ScrapeRequest(names=["a"])],
    "/grpc.health.v1.Health/Check": [health_pb2.HealthCheckRequest()],
    "/grpc.health.v1.Health/Watch": [health_pb2.HealthCheckRequest()],
}


def multi_callable(channel: Any, method: Any) -> Any:
    """The caller of a method, by its descriptor."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_"
    kind += "stream" if method.server_streaming else "unary"
    return getattr(channel, kind)(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=lambda message: (
            message if isinstance(message, bytes) else message.SerializeToString()
        ),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )


@asynccontextmanager
async def predictor(folder: Path) -> AsyncIterator[Target]:
    given = predicting.input_of("r", "hello", "be brief", [3])
    outcome = predicting.ended("r", 5, e2e_s=0.5)
    live = predictor_pb2.LiveAnswers(model="demo", application="a", output_tokens=[3])
    observed = predictor_pb2.ObserveOutcomesRequest(
        outcomes=[outcome], live=[live], ended_ids=["e"], reporter="s"
    )
    async with predicting.predicting("retrieval", way="socket") as running:

        async def serves() -> None:
            assert await running.forecast(given)
            await running.observe(outcome)

        yield Target(
            running.channel,
            {
                f"/{PACKAGE}.Predictor/Forecast": [predicting.forecast_of(given)],
                f"/{PACKAGE}.Predictor/Improve": [predictor_pb2.ImproveRequest()],
                f"/{PACKAGE}.Predictor/Observe": [observed],
            },
            serves,
        )


@asynccontextmanager
async def estimator(folder: Path) -> AsyncIterator[Target]:
    steps = [(16 * (i % 3), i % 5, 16 * (i % 5) + i % 7) for i in range(1, 21)]
    observed = estimator_pb2.ObserveTimingsRequest(
        worker_id="w",
        timings=[
            common_pb2.StepTiming(
                prefill_tokens=p,
                decode_seqs=d,
                context_tokens=c,
                elapsed_s=0.002 + d / 1_000 + p / 10_000,
            )
            for p, d, c in steps
        ],
        swaps=[
            common_pb2.SwapTiming(
                direction=common_pb2.DIRECTION_OFFLOAD, tokens=n, elapsed_s=n / 1e5
            )
            for n in (5, 6, 7)
        ],
        batches=[
            estimator_pb2.BatchTiming(seqs=2, length_tokens=9, generated_tokens=8, elapsed_s=0.1)
        ],
    )
    config = EstimatorConfig(refit_samples=8, refit_interval_s=0, batch_refresh_s=1e-9)
    served = EstimatorService(config, CollectorRegistry())
    add = estimator_pb2_grpc.add_EstimatorServicer_to_server
    async with reaching("socket", f"{PACKAGE}.Estimator", add, served) as channel:
        good = estimator_pb2.ObserveTimingsRequest()
        good.CopyFrom(observed)
        good.worker_id = "good"
        asked = estimator_pb2.GetCostModelRequest(worker_id="w")

        async def serves() -> None:
            assert (await estimator_pb2_grpc.EstimatorStub(channel).Observe(good)).version > 0

        yield Target(
            channel,
            {
                f"/{PACKAGE}.Estimator/GetCostModel": [asked],
                f"/{PACKAGE}.Estimator/WatchCostModel": [asked],
                f"/{PACKAGE}.Estimator/Observe": [observed],
            },
            serves,
        )


@asynccontextmanager
async def batcher(folder: Path) -> AsyncIterator[Target]:
    sentence = [encode_hello(choose("fcfs")), arranging.waiting_request()]
    served = arranging.served({})
    async with reaching("socket", arranging.NAME, arranging.ADD, served) as channel:
        stub = batcher_pb2_grpc.BatcherStub(channel)

        async def serves() -> None:
            assert [each async for each in stub.Arrange(aiter_of(sentence))]

        yield Target(channel, {f"/{PACKAGE}.Batcher/Arrange": sentence}, serves)


@asynccontextmanager
async def scheduler(folder: Path) -> AsyncIterator[Target]:
    hello = scheduler_pb2.WorkerHello(
        worker_id="w", address="unix:/w", model="demo", block_tokens=16, kv_tokens=16_000,
        max_running=200, max_context_tokens=500, profile=scheduling.PROFILE[:2],
        held=[scheduler_pb2.HeldRequest(request_id="h", prompt_tokens=5, max_tokens=9)],
    )  # fmt: skip
    report = scheduler_pb2.Report(
        seq=1,
        applied_plan_seq=1,
        progress=scheduler_pb2.ProgressColumns(
            request_ids=["a"], output_tokens=[3], held_tokens=[13], blocks=[1]
        ),
        free_blocks=999,
        timings=scheduling.PROFILE[:2],
        evicted=[scheduler_pb2.Progress(request_id="h", output_tokens=1)],
    )
    ended = scheduler_pb2.FinishedRequest(
        request_id="a", output_tokens=9, reason=common_pb2.FINISH_REASON_STOP
    )
    adapter = scheduler_pb2.Adapter(model="demo", name="a", path="/a")
    messages = [
        scheduler_pb2.WorkerMessage(hello=hello),
        scheduler_pb2.WorkerMessage(report=report),
        scheduler_pb2.WorkerMessage(report=scheduler_pb2.Report(seq=2, finished=[ended])),
        scheduler_pb2.WorkerMessage(adapters=scheduler_pb2.AdapterStates(seq=1)),
        scheduler_pb2.WorkerMessage(draining=scheduler_pb2.WorkerDraining(drain_s=1)),
    ]
    submission = scheduling.submitted("a")
    submission.request.sla.ttft_s = 1.0
    submission.request.deadline_in_s = 5.0
    submits = [
        scheduler_pb2.SubmitMessage(hello=scheduler_pb2.SubmitHello(gateway_id="g")),
        submission,
        scheduling.cancelled("a"),
    ]
    name = f"/{scheduling.NAME}"
    async with scheduling.running(adapter_wait_s=0.2) as live:
        live.texts.may.set()

        async def serves() -> None:
            """Another gateway's request is placed at another worker."""
            gateway = live.gateway()
            worker = live.worker("good", model="good", address="unix:/good")
            await until(lambda: "good" in live.service.state.workers)
            gateway.say(scheduling.submitted("good", model="good"))
            await until(lambda: "good" in scheduling.run_step(gateway, "placed"))
            for stream in (gateway, worker):
                stream.leave()
                await stream.reading
                live.streams.remove(stream)

        yield Target(
            live.channel,
            {
                f"{name}/Attach": messages,
                f"{name}/Submit": submits,
                f"{name}/GetFleet": [scheduler_pb2.GetFleetRequest()],
                f"{name}/Why": [scheduler_pb2.WhyRequest(request_id="a")],
                f"{name}/LoadAdapter": [adapter],
                f"{name}/UnloadAdapter": [adapter],
            },
            serves,
        )


@asynccontextmanager
async def worker(folder: Path) -> AsyncIterator[Target]:
    sampling = common_pb2.Sampling(
        temperature=0.5, top_p=0.9, top_k=5, seed=1, logprobs=1, stop_token_ids=[3],
        logit_bias={5: 1.0}, allowed_token_ids=[5, 6, 7], bad_tokens=[common_pb2.TokenIds(ids=[5])],
        repetition_penalty=1.1, min_tokens=1,
    )  # fmt: skip
    prompt = worker_pb2.Prompt(
        request_id="a", token_ids=[5, 6, 7, 8], prompt_tokens=3, max_tokens=4, sampling=sampling
    )
    scored = worker_pb2.Prompt(
        request_id="b", token_ids=[5, 6, 7], prompt_tokens=3, max_tokens=2,
        sampling=common_pb2.Sampling(prompt_logprobs=1), cache_salt="s",
    )  # fmt: skip
    sentence = [
        worker_pb2.WorkerInput(hello=worker_pb2.StreamHello(gateway_id="g")),
        worker_pb2.WorkerInput(prompt=prompt),
        worker_pb2.WorkerInput(prompt=scored),
    ]
    async with working.running(folder) as world:
        served = 0

        async def serves() -> None:
            nonlocal served
            served += 1
            name, gateway = f"good{served}", world.gateway()
            gateway.send(name, (5, 6, 7), 2, ignore_eos=True)
            world.scheduler.admit(name, limit=2)
            await until(lambda: name in gateway.ended)
            assert len(gateway.tokens[name]) == 2
            gateway.leave()

        def admit(conversation: Conversation) -> None:
            prompts = [m.prompt for m in conversation if isinstance(m, worker_pb2.WorkerInput)]
            world.scheduler.admit(*{each.request_id for each in prompts})

        yield Target(world.channel, {f"/{PACKAGE}.Worker/Stream": sentence}, serves, admit)


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[Target]:
    sampling = common_pb2.Sampling(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=1, stop=["z"], max_tokens=3, n=2,
        min_tokens=1, logprobs=1, stop_token_ids=[3], logit_bias={5: 1.0}, bad_words=["bad"],
    )  # fmt: skip
    chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="hello")])
    request = gateway_pb2.GenerateRequest(
        chat=chat, sampling=sampling, sla=common_pb2.Sla(ttft_s=1.0), include_forecast=True
    )
    simple = gateway_pb2.GenerateRequest(
        prompt_tokens=common_pb2.TokenIds(ids=ANSWER), sampling=common_pb2.Sampling(max_tokens=3)
    )
    name = f"/{PACKAGE}.Gateway"
    async with run_harness(lambda _: ANSWER) as harness:
        channel = connect(harness.grpc_address)
        stub = gateway_pb2_grpc.GatewayStub(channel)

        async def serves() -> None:
            answers = [each async for each in stub.Generate(simple)]
            assert answers[-1].usage.completion_tokens == 3

        yield Target(
            channel,
            {
                f"{name}/Generate": [request],
                f"{name}/ListModels": [gateway_pb2.ListModelsRequest()],
                f"{name}/Why": [scheduler_pb2.WhyRequest(request_id="a")],
            },
            serves,
        )
        await channel.close()


@asynccontextmanager
async def picker(folder: Path) -> AsyncIterator[Target]:
    name = "envoy.service.ext_proc.v3.ExternalProcessor"
    add = ext_proc_pb2_grpc.add_ExternalProcessorServicer_to_server
    async with AsyncExitStack() as stack:
        vllm = CollectorRegistry()
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            Gauge(gauge, "requests", registry=vllm)
        metrics = metrics_over_http("127.0.0.1", 0, [Part(vllm)])
        port = await stack.enter_async_context(metrics)
        endpoint = f"127.0.0.1:{port}"
        first = request_headers(x_llm_d_slo_ttft_ms="100")
        first.protocol_config.request_body_mode = ext_proc_pb2.FULL_DUPLEX_STREAMED
        answer = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
        sentence = [
            first,
            request_body(BODY),
            response_headers("200", served=endpoint),
            response_body(answer, end=True),
        ]
        service = PickerService(PickerConfig(endpoints=(endpoint,)), CollectorRegistry())
        await stack.enter_async_context(background(service.run()))
        await service.ready()
        channel = await stack.enter_async_context(reaching("socket", name, add, service))
        stub = ext_proc_pb2_grpc.ExternalProcessorStub(channel)

        async def serves() -> None:
            answers = [each async for each in stub.Process(aiter_of(sentence))]
            assert answers[0].HasField("request_headers")

        yield Target(channel, {f"/{name}/Process": sentence}, serves)


async def aiter_of(messages: Sequence[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


SERVERS: Mapping[str, Callable[[Path], AbstractAsyncContextManager[Target]]] = {
    "predictor": predictor,
    "estimator": estimator,
    "batcher": batcher,
    "scheduler": scheduler,
    "worker": worker,
    "gateway": gateway,
    "picker": picker,
}

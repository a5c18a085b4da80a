"""A fake scheduler and a fake worker with scripted answers, over real gRPC, and a gateway between
them and real sockets for clients. The fakes record all messages."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from gateway.config import GatewayConfig
from gateway.faces.app import build_app
from gateway.faces.grpc.service import mount
from gateway.faces.http.serve import serving_http
from gateway.front import Front
from gateway.gateway import Gateway
from gateway.requests.text import Text
from models.tokenizer import make_tokenizer
from observability.tracing import NO_SPANS, Spans
from protos.generated import common_pb2 as common
from protos.generated import scheduler_pb2 as sched
from protos.generated import scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.runtime.errors import Code, ServiceError
from services.runtime.network.channel import InProcessServer, connect
from services.runtime.server import Mount, Server, listening
from services.runtime.tasks import background
from tests.gateway.adapter_fakes import FakeAdapters
from tests.reach import until

REACH_TOKENS = 512
STEP_S = 0.001


@cache
def demo_folder() -> str:
    """A model folder with the demo model's tokenizer and no weights."""
    folder = Path(mkdtemp(prefix="foretoken-tokenizer-")) / "demo"
    make_tokenizer().save_pretrained(str(folder))
    return str(folder)


@cache
def demo_text() -> Text:
    return Text(demo_folder())


def tokens_of(text: str) -> list[int]:
    """The tokens of each character, encoded alone, so that tests can count them."""
    return [token for character in text for token in demo_text().encode(character)]


@dataclass
class FakeScheduler(FakeAdapters):
    """Places every request at `worker_address` unless `place` is off. `send_event` sends other
    events."""

    worker_address: str = ""
    epoch: int = 0  # of the workers
    place: bool = True
    model: str = "demo"  # of the workers
    kv_tokens: int = REACH_TOKENS
    queued: int = 0
    drain_s: float = 0.0
    forecast: sched.ForecastUpdate | None = None  # sent for each request that includes forecasts
    hellos: list[str] = field(default_factory=list)
    requests: list[sched.NewRequest] = field(default_factory=list)
    cancels: list[sched.CancelRequest] = field(default_factory=list)
    view: sched.FleetView | None = None  # the answer of GetFleet; None: the fleet of the stream
    adapters: list[sched.Adapter] = field(default_factory=list)
    fleet_queries: int = 0
    stories: dict[str, sched.Story] = field(default_factory=dict)
    answers: Callable[[sched.NewRequest], sched.RequestEvent | None] = lambda _: None
    streams: list[asyncio.Queue[sched.SchedulerEvent | None]] = field(default_factory=list)

    def send_event(self, request_id: str, **event: Any) -> None:
        event_message = sched.RequestEvent(request_id=request_id, **event)
        self.streams[-1].put_nowait(sched.SchedulerEvent(request=event_message))

    def send_placed(self, request_id: str, address: str | None = None) -> None:
        placed = sched.Placed(worker_id="w", worker_address=address or self.worker_address)
        self.send_event(request_id, placed=placed)

    def fleet(self, addresses: Sequence[str]) -> sched.SchedulerEvent:
        workers = [
            sched.WorkerInfo(
                worker_id=f"w{at}", address=address, model=self.model,
                kv_tokens=self.kv_tokens, max_context_tokens=2 * REACH_TOKENS, epoch=self.epoch,
            )
            for at, address in enumerate(addresses)
        ]  # fmt: skip
        view = sched.FleetView(
            workers=workers, queued=self.queued, drain_s=self.drain_s, adapters=self.adapters
        )
        return sched.SchedulerEvent(fleet=view)

    def break_stream(self) -> None:
        self.streams[-1].put_nowait(None)

    async def Submit(
        self, requests: AsyncIterator[sched.SubmitMessage], context: Any
    ) -> AsyncIterator[sched.SchedulerEvent]:
        queue: asyncio.Queue[sched.SchedulerEvent | None] = asyncio.Queue()
        self.streams.append(queue)
        reader = asyncio.ensure_future(self._read(requests, queue))
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            reader.cancel()

    async def Attach(
        self, requests: AsyncIterator[sched.WorkerMessage], context: Any
    ) -> AsyncIterator[sched.Plan]:
        async for _ in requests:
            yield sched.Plan()

    async def Why(self, request: sched.WhyRequest, context: Any) -> sched.WhyResponse:
        story = self.stories.get(request.request_id)
        if story is None:
            raise ServiceError(Code.NOT_FOUND, f"no request {request.request_id!r} is remembered")
        return sched.WhyResponse(stories=[story])

    async def GetFleet(self, request: sched.GetFleetRequest, context: Any) -> sched.FleetView:
        self.fleet_queries += 1
        return self.view or self.fleet([self.worker_address]).fleet

    async def _read(
        self,
        requests: AsyncIterator[sched.SubmitMessage],
        queue: asyncio.Queue[sched.SchedulerEvent | None],
    ) -> None:
        async for message in requests:
            match message.WhichOneof("kind"):
                case "hello":
                    self.hellos.append(message.hello.gateway_id)
                    addresses = [self.worker_address] if self.worker_address else []
                    queue.put_nowait(self.fleet(addresses))
                case "request":
                    self.requests.append(message.request)
                    self._answer(message.request)
                case "cancel":
                    self.cancels.append(message.cancel)

    def _answer(self, request: sched.NewRequest) -> None:
        if self.forecast and request.include_forecast:
            self.send_event(request.request_id, forecast_update=self.forecast)
        answer = self.answers(request)
        if answer is not None:
            answer.request_id = request.request_id
            self.streams[-1].put_nowait(sched.SchedulerEvent(request=answer))
        elif self.place:
            self.send_placed(request.request_id)


@dataclass
class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Answers each prompt with the tokens `script(prompt)`, `per_step` in each step, beginning
    `prefill_s` after its arrival. Without a script, it sends only what the test sends."""

    script: Callable[[worker_pb2.Prompt], Sequence[int]] | None = None
    step_s: float = STEP_S
    prefill_s: float = 0.0
    per_step: int = 1
    cached_tokens: int = 0  # of each prompt
    prompts: list[worker_pb2.Prompt] = field(default_factory=list)
    opened: int = 0  # streams so far
    streams: list[asyncio.Queue[worker_pb2.TokenBatch | None]] = field(default_factory=list)
    _running: dict[str, tuple[worker_pb2.Prompt, int]] = field(default_factory=dict)

    def send(
        self,
        request_id: str,
        offset: int,
        token_ids: Sequence[int],
        reason: common.FinishReason.ValueType = common.FINISH_REASON_UNSPECIFIED,
        message: str = "",
        logprobs: Sequence[common.TokenLogprob] = (),
    ) -> None:
        tokens = worker_pb2.RequestTokens(
            request_id=request_id, offset=offset, token_ids=token_ids,
            finish_reason=reason, message=message, logprobs=logprobs,
        )  # fmt: skip
        self.streams[-1].put_nowait(worker_pb2.TokenBatch(requests=[tokens]))

    def refuse(self, request_id: str, why: str) -> None:
        tokens = worker_pb2.RequestTokens(
            request_id=request_id, finish_reason=common.FINISH_REASON_ERROR, message=why,
            refused=True,
        )  # fmt: skip
        self.streams[-1].put_nowait(worker_pb2.TokenBatch(requests=[tokens]))

    def break_stream(self) -> None:
        self.streams[-1].put_nowait(None)

    async def Stream(
        self, requests: AsyncIterator[worker_pb2.WorkerInput], context: Any
    ) -> AsyncIterator[worker_pb2.TokenBatch]:
        queue: asyncio.Queue[worker_pb2.TokenBatch | None] = asyncio.Queue()
        self.streams.append(queue)
        tasks = [asyncio.ensure_future(self._read(requests)), asyncio.ensure_future(self._step())]
        try:
            while (batch := await queue.get()) is not None:
                yield batch
        finally:
            self._running.clear()
            for task in tasks:
                task.cancel()

    async def _read(self, requests: AsyncIterator[worker_pb2.WorkerInput]) -> None:
        async for message in requests:
            if message.WhichOneof("kind") == "hello":
                self.opened += 1
            else:
                prompt = message.prompt
                self.prompts.append(prompt)
                done = len(prompt.token_ids) - prompt.prompt_tokens
                self._run(prompt, done)

    def _run(self, prompt: worker_pb2.Prompt, done: int) -> None:
        def begin() -> None:
            self._running[prompt.request_id] = (prompt, done)

        if self.prefill_s:
            asyncio.get_running_loop().call_later(self.prefill_s, begin)
        else:
            begin()

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            batch = [self._next(*item) for item in list(self._running.values())]
            if self.script and batch:
                self.streams[-1].put_nowait(worker_pb2.TokenBatch(requests=batch))

    def _next(self, prompt: worker_pb2.Prompt, done: int) -> worker_pb2.RequestTokens:
        answer = list(self.script(prompt))[: prompt.max_tokens] if self.script else []
        ids = answer[done : done + self.per_step]
        self._running[prompt.request_id] = (prompt, done + len(ids))
        tokens = worker_pb2.RequestTokens(request_id=prompt.request_id, offset=done, token_ids=ids)
        if len(prompt.token_ids) - prompt.prompt_tokens == done:
            self._add_prompt_info(prompt, tokens)
        if prompt.sampling.HasField("logprobs"):
            tokens.logprobs.extend(_logprob(i, prompt.sampling.logprobs) for i in ids)
        if self.script and done + len(ids) >= len(answer):
            full = len(answer) >= prompt.max_tokens
            tokens.finish_reason = (
                common.FINISH_REASON_LENGTH if full else common.FINISH_REASON_STOP
            )
            del self._running[prompt.request_id]
        return tokens

    def _add_prompt_info(self, prompt: worker_pb2.Prompt, tokens: worker_pb2.RequestTokens) -> None:
        """Adds what accompanies the first tokens. The score of a prompt token is its negative
        position."""
        tokens.cached_tokens = self.cached_tokens
        if prompt.sampling.HasField("prompt_logprobs"):
            alternatives = prompt.sampling.prompt_logprobs
            for at, token in enumerate(prompt.token_ids[1 : prompt.prompt_tokens], 1):
                tokens.prompt_logprobs.append(_logprob(token, alternatives, -at))


def _logprob(token_id: int, alternatives: int, logprob: float = -0.25) -> common.TokenLogprob:
    ids = [token_id, *range(40, 40 + alternatives)][:alternatives]
    return common.TokenLogprob(
        token_id=token_id, logprob=logprob, top_ids=ids,
        top_logprobs=[logprob - at for at in range(len(ids))],
    )  # fmt: skip


def scheduler_mount(scheduler: FakeScheduler) -> Mount:
    add = scheduler_pb2_grpc.add_SchedulerServicer_to_server
    return Mount("foretoken.v1.Scheduler", add, scheduler)


def worker_mount(worker: FakeWorker) -> Mount:
    return Mount("foretoken.v1.Worker", worker_pb2_grpc.add_WorkerServicer_to_server, worker)


@dataclass
class Harness:
    """A gateway on real sockets, its fakes, and their addresses."""

    scheduler: FakeScheduler
    worker: FakeWorker
    front: Front
    scheduler_server: Server
    worker_server: Server
    grpc_address: str
    http_url: str
    stack: AsyncExitStack  # closes what a test adds before the servers

    @property
    def gateway(self) -> Gateway:
        """The gateway of the only model."""
        return self.front.first

    async def until(self, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
        """Waits for a condition that must become true; a failing test takes `limit_s`."""
        await until(condition, limit_s)

    async def http(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> "Reply":
        """One HTTP exchange; a body that is not bytes is sent as JSON."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        return await asyncio.to_thread(_exchange, self.http_url, method, path, raw, headers or {})


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The JSON events of a stream. The last event must be [DONE] and is omitted."""
        data = [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        return [json.loads(item) for item in data[:-1]]


def _exchange(
    url: str, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
) -> Reply:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, headers, response.read().decode())
    finally:
        connection.close()


@asynccontextmanager
async def run_harness(
    script: Callable[[worker_pb2.Prompt], Sequence[int]] | None = None,
    place: bool = True,
    with_worker: bool = True,
    in_process: bool = False,
    queue: tuple[int, float] = (0, 0.0),
    spans: Spans = NO_SPANS,
    **config: Any,
) -> AsyncIterator[Harness]:
    """Starts and connects everything, and stops it at the end. `queue`: the number of waiting
    requests and the drain time that the scheduler reports."""
    queued, drain_s = queue
    scheduler = FakeScheduler(place=place, queued=queued, drain_s=drain_s)
    worker = FakeWorker(script)
    async with AsyncExitStack() as stack:
        worker_server = await stack.enter_async_context(
            listening([worker_mount(worker)], "127.0.0.1:0")
        )
        scheduler_server = await stack.enter_async_context(
            listening([scheduler_mount(scheduler)], "127.0.0.1:0")
        )
        if with_worker:
            scheduler.worker_address = f"127.0.0.1:{worker_server.port}"
        settings = GatewayConfig(
            model=demo_folder(),
            scheduler_address=f"127.0.0.1:{scheduler_server.port}",
            **config,
        )
        channel = connect(settings.scheduler_address)
        if in_process:
            scheduler_mount(scheduler).add(scheduler, inner := InProcessServer())
            channel = inner.channel()
        stack.push_async_callback(channel.close)
        front = Front(settings, lambda _: channel, connect, connect, spans=spans)
        await stack.enter_async_context(background(front.run()))
        web = serving_http(build_app(front), "127.0.0.1", 0, settings)
        http_port = await stack.enter_async_context(web)
        server = await stack.enter_async_context(listening([mount(front)], "127.0.0.1:0"))
        harness = Harness(
            scheduler, worker, front, scheduler_server, worker_server,
            f"127.0.0.1:{server.port}", f"http://127.0.0.1:{http_port}", stack,
        )  # fmt: skip
        await harness.until(lambda: front.ready or not with_worker)
        await harness.until(lambda: bool(scheduler.hellos))
        yield harness

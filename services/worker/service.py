"""The worker's gRPC service: prompts from gateways, tokens to them."""

import time
from collections.abc import AsyncIterator
from itertools import count

from observability.tracing import NO_SPANS
from protos.generated import worker_pb2, worker_pb2_grpc
from services.runtime.border import check_name
from services.runtime.errors import Code, ServiceError
from services.runtime.network.peer_limits import PeerLimits
from services.runtime.network.streams import duplex
from services.worker.border import check_prompt
from services.worker.codec import decode_prompt
from services.worker.config import WorkerConfig
from services.worker.engine.mailbox import AddPrompt, CloseStream, OpenStream, RefuseRequest
from services.worker.engine.runner import EngineRunner
from services.worker.outbox import TokenOutbox
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.prompt import Prompt
from services.worker.spans import WorkerSpans

OVERFLOW = "more tokens wait than worker.outbox_tokens allows; reconnect and resubmit"


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Sends tokens on the stream of their prompt. Tokens of a closed stream are lost: its gateway
    resubmits the requests, and the scheduler, or without one the engine, ends them here."""

    def __init__(
        self, config: WorkerConfig, runner: EngineRunner, spans: WorkerSpans | None = None
    ):
        self._runner = runner
        self._spans = spans or WorkerSpans(NO_SPANS)
        self._outbox_tokens = config.outbox_tokens
        most = {"gateway": config.max_gateways}
        self._limits = PeerLimits(config.section, most, config.hello_wait_s)
        self._outboxes: dict[str, TokenOutbox] = {}
        self._streams = count(1)
        runner.on_tokens = self._post
        runner.on_error = self._post_error
        runner.on_refusal = self._post_refusal

    async def Stream(
        self, requests: AsyncIterator[worker_pb2.WorkerInput], context: object
    ) -> AsyncIterator[worker_pb2.TokenBatch]:
        with self._limits.stream("gateway"):
            first = await self._limits.read_hello(requests)
            check_name("hello.gateway_id", first.hello.gateway_id)
            origin = f"{first.hello.gateway_id}#{next(self._streams)}"
            outbox = self._outboxes[origin] = TokenOutbox(self._outbox_tokens)
            self._runner.send(OpenStream(origin))
            try:
                async for batch in duplex(self._read(origin, requests), outbox):
                    yield batch
                if outbox.overflowed:
                    raise ServiceError(Code.RESOURCE_EXHAUSTED, OVERFLOW)
            finally:
                del self._outboxes[origin]
                self._runner.send(CloseStream(origin))

    async def _read(self, origin: str, requests: AsyncIterator[worker_pb2.WorkerInput]) -> None:
        async for message in requests:
            if message.HasField("prompt"):
                check_prompt(message.prompt)
                self._receive(message.prompt, origin)
                await self._runner.wait_for_room()

    def _receive(self, message: worker_pb2.Prompt, origin: str) -> None:
        try:
            prompt = decode_prompt(message, origin)
        except ValueError as error:
            self._runner.send(RefuseRequest(message.request_id))
            self._outboxes[origin].add_refusal(message.request_id, 0, str(error))
            return
        delivered = prompt.delivered_tokens
        self._spans.on_prompt(prompt.request_id, prompt.traceparent, delivered, time.monotonic())
        self._runner.send(AddPrompt(prompt))

    def _post(self, tokens: list[NewToken]) -> None:
        self._spans.on_tokens(tokens, time.monotonic())
        for token in tokens:
            if outbox := self._outboxes.get(token.origin):
                outbox.add(token)

    def _post_error(self, prompt: Prompt, offset: int, why: str) -> None:
        if outbox := self._outboxes.get(prompt.origin):
            outbox.add_error(prompt.request_id, offset, why)

    def _post_refusal(self, prompt: Prompt, why: str) -> None:
        if outbox := self._outboxes.get(prompt.origin):
            outbox.add_refusal(prompt.request_id, prompt.delivered_tokens, why)

"""The Python clients, over gRPC: `Client` blocks, `AsyncClient` awaits.

with Client("127.0.0.1:50051") as client:
    for chunk in client.generate("copy: a b c", max_tokens=32, sla="interactive"):
        print(chunk.text, end="")
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Generic, Self, TypeVar, Unpack, cast

import grpc
from grpc import aio

from foretoken.client.address import DEFAULT_SERVER, parse_grpc_target
from foretoken.client.answers import (
    Answer,
    Chunk,
    RequestOptions,
    Usage,
    assemble,
    decode_chunk,
    decode_usage,
    make_request,
)
from foretoken.client.errors import from_status
from protos.generated import gateway_pb2, gateway_pb2_grpc
from services.runtime.network.channel import MAX_MESSAGE_BYTES, OPTIONS

TIMEOUT_KEY = "x-request-timeout-s"
GRACE_S = 2.0  # beyond the timeout that the server enforces
MODELS_TIMEOUT_S = 10.0

# A server that drains asks for a new connection (HTTP/2 GOAWAY). gRPC in Python cancels a call that
# is on its way meanwhile, before the servicer has it. Another connection leads to another gateway.
RETRIES = (
    ("grpc.service_config", json.dumps({
        "methodConfig": [{
            "name": [{}],  # all methods
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.02s",
                "maxBackoff": "0.5s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["CANCELLED"],
            },
        }],
    })),
    ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES),  # larger requests are not sent again
)  # fmt: skip

Messages = Iterable[Mapping[str, str]]
Sla = str | Mapping[str, float]
S = TypeVar("S", "Stream", "AsyncStream")


class _BaseStream:
    """An answer that is being received. `usage` is set at the end."""

    def __init__(self, call: Any, address: str):
        self._call, self._address = call, address
        self._cancelled = False
        self.request_id = ""
        self.usage: Usage | None = None

    def cancel(self) -> None:
        """Cancels the request; iteration ends. Does nothing once it has ended."""
        self._cancelled = True
        self._call.cancel()

    def _decode(self, response: gateway_pb2.GenerateResponse) -> Iterator[Chunk]:
        self.request_id = response.request_id
        if response.HasField("usage"):
            self.usage = decode_usage(response.usage)
        else:
            yield decode_chunk(response)


class Stream(_BaseStream):
    """An answer that is being received: iterate its chunks. Leaving early cancels the request.

    Iterating raises `ForetokenError`.
    """

    def __iter__(self) -> Iterator[Chunk]:
        try:
            for response in self._call:
                yield from self._decode(response)
        except grpc.RpcError as error:
            status = cast(grpc.Call, error)
            if not (self._cancelled and status.code() is grpc.StatusCode.CANCELLED):
                raise from_status(status, self._address) from None
        finally:
            self.cancel()

    def complete(self) -> Answer:
        """Waits for the complete answer."""
        chunks = list(self)
        return assemble(self.request_id, chunks, self.usage)


class AsyncStream(_BaseStream):
    """The asynchronous `Stream`: `async for`, and `await stream.complete()`."""

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            async for response in self._call:
                for chunk in self._decode(response):
                    yield chunk
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._cancelled or (task is not None and task.cancelling()):
                raise
        except aio.AioRpcError as error:
            if not (self._cancelled and error.code() is grpc.StatusCode.CANCELLED):
                raise from_status(error, self._address) from None
        finally:
            self.cancel()

    async def complete(self) -> Answer:
        """Waits for the complete answer."""
        chunks = [chunk async for chunk in self]
        return assemble(self.request_id, chunks, self.usage)


class _BaseClient(Generic[S]):
    """What both clients share: the channel, the API key, and how a request is sent."""

    _stream_kind: type[S]

    def __init__(self, address: str, api_key: str, module: Any):
        """`module` is `grpc` or `grpc.aio`. Raises ValueError for an HTTP address."""
        self.address = parse_grpc_target(address)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel = module.insecure_channel(self.address, options=(*OPTIONS, *RETRIES))
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Iterable[int] | None = None,
        model: str = "",
        sla: Sla | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> S:
        """Starts an answer to exactly one of a prompt, a conversation, or token ids.

        `sla` is a class name or a mapping of budgets; after `timeout_s` the answer ends with
        finish reason `deadline`, or raises DeadlineExceeded before the first token.
        """
        request = make_request(prompt, messages, tokens, model, sla, options)
        return self.send(request, timeout_s)

    def send(self, request: gateway_pb2.GenerateRequest, timeout_s: float | None = None) -> S:
        """Starts the answer to a request that `make_request` built."""
        limits: dict[str, Any] = {"metadata": self._metadata}
        if timeout_s is not None:
            # The server enforces the timeout, so that tokens that are ready by then still arrive.
            limits["timeout"] = max(0.0, timeout_s) + GRACE_S
            limits["metadata"] = (*self._metadata, (TIMEOUT_KEY, f"{timeout_s:g}"))
        return self._stream_kind(self._stub.Generate(request, **limits), self.address)

    def _list_models(self) -> Any:
        return self._stub.ListModels(
            gateway_pb2.ListModelsRequest(), timeout=MODELS_TIMEOUT_S, metadata=self._metadata
        )


class Client(_BaseClient[Stream]):
    """A blocking client, safe to share between threads. Close it, or use it in a `with` block.

    `address` is `host:port` or `unix:/path` of the gateway's gRPC listener. `api_key` is needed if
    the server requires one.
    """

    _stream_kind = Stream

    def __init__(self, address: str = DEFAULT_SERVER, api_key: str = ""):
        super().__init__(address, api_key, grpc)

    def complete(self, prompt: str | None = None, **options: Any) -> Answer:
        """Returns the complete answer; takes the arguments of `generate`."""
        return self.generate(prompt, **options).complete()

    def models(self) -> list[str]:
        """Returns the names of the served models."""
        try:
            return [model.name for model in self._list_models().models]
        except grpc.RpcError as error:
            raise from_status(cast(grpc.Call, error), self.address) from None

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_BaseClient[AsyncStream]):
    """The asynchronous `Client`. Create it inside a running event loop."""

    _stream_kind = AsyncStream

    def __init__(self, address: str = DEFAULT_SERVER, api_key: str = ""):
        super().__init__(address, api_key, aio)

    async def complete(self, prompt: str | None = None, **options: Any) -> Answer:
        """Returns the complete answer; takes the arguments of `generate`."""
        return await self.generate(prompt, **options).complete()

    async def models(self) -> list[str]:
        """Returns the names of the served models."""
        try:
            return [model.name for model in (await self._list_models()).models]
        except aio.AioRpcError as error:
            raise from_status(error, self.address) from None

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

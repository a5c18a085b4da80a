"""The Python clients, over gRPC: `Client` blocks, `AsyncClient` awaits.

with Client("127.0.0.1:50051") as client:
    for chunk in client.generate("copy: a b c", max_tokens=32, sla="interactive"):
        print(chunk.text, end="")
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Self, Unpack, cast

import grpc
from grpc import aio

from foretoken.client.address import DEFAULT_SERVER
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
from services.runtime.channel import OPTIONS

TIMEOUT_KEY = "x-request-timeout-s"
GRACE_S = 2.0  # beyond the timeout that the server enforces

Messages = Iterable[Mapping[str, str]]
Sla = str | Mapping[str, float]
Metadata = tuple[tuple[str, str], ...]


class Stream:
    """An answer that is being received: iterate its chunks. Leaving early cancels the request.

    `usage` is set at the end. Iterating raises `ForetokenError`.
    """

    def __init__(self, call: Any, address: str):
        self._call, self._address = call, address
        self.request_id = ""
        self.usage: Usage | None = None

    def __iter__(self) -> Iterator[Chunk]:
        try:
            for response in self._call:
                self.request_id = response.request_id
                if response.HasField("usage"):
                    self.usage = decode_usage(response.usage)
                else:
                    yield decode_chunk(response)
        except grpc.RpcError as error:
            status = cast(grpc.Call, error)
            if status.code() is not grpc.StatusCode.CANCELLED:
                raise from_status(
                    status.code(), status.details(), status.trailing_metadata(), self._address
                ) from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the request; iteration ends. Does nothing once it has ended."""
        self._call.cancel()

    def complete(self) -> Answer:
        """Wait for the complete answer."""
        chunks = list(self)
        return assemble(self.request_id, chunks, self.usage)


class AsyncStream:
    """The asynchronous `Stream`: `async for`, and `await stream.complete()`."""

    def __init__(self, call: Any, address: str):
        self._call, self._address = call, address
        self.request_id = ""
        self.usage: Usage | None = None
        self._cancelled = False

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            async for response in self._call:
                self.request_id = response.request_id
                if response.HasField("usage"):
                    self.usage = decode_usage(response.usage)
                else:
                    yield decode_chunk(response)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._cancelled or (task is not None and task.cancelling()):
                raise
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise from_status(
                    error.code(), error.details(), error.trailing_metadata(), self._address
                ) from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the request; iteration ends. Does nothing once it has ended."""
        self._cancelled = True
        self._call.cancel()

    async def complete(self) -> Answer:
        """Wait for the complete answer."""
        chunks = [chunk async for chunk in self]
        return assemble(self.request_id, chunks, self.usage)


class Client:
    """A blocking client, safe to share between threads. Close it, or use it in a `with` block.

    `api_key` is needed if the server requires one.
    """

    def __init__(self, address: str = DEFAULT_SERVER, api_key: str = ""):
        self.address = address
        self._key = _bearer(api_key)
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
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
    ) -> Stream:
        """Start an answer to exactly one of a prompt, a conversation, or token ids.

        `sla` is a class name or a mapping of budgets; after `timeout_s` the answer ends with
        finish reason `deadline`, or raises DeadlineExceeded before the first token.
        """
        request = make_request(prompt, messages, tokens, model, sla, options)
        return Stream(self._stub.Generate(request, **_timing(timeout_s, self._key)), self.address)

    def complete(self, prompt: str | None = None, **options: Any) -> Answer:
        """Return the complete answer; takes the arguments of `generate`."""
        return self.generate(prompt, **options).complete()

    def models(self) -> list[str]:
        """Return the names of the served models."""
        try:
            listed = self._stub.ListModels(
                gateway_pb2.ListModelsRequest(), timeout=10, metadata=self._key
            )
        except grpc.RpcError as error:
            status = cast(grpc.Call, error)
            raise from_status(status.code(), status.details(), (), self.address) from None
        return [model.name for model in listed.models]

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio. Make it inside a running event loop."""

    def __init__(self, address: str = DEFAULT_SERVER, api_key: str = ""):
        self.address = address
        self._key = _bearer(api_key)
        self._channel = aio.insecure_channel(address, options=OPTIONS)
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
    ) -> AsyncStream:
        """As `Client.generate`."""
        request = make_request(prompt, messages, tokens, model, sla, options)
        return AsyncStream(
            self._stub.Generate(request, **_timing(timeout_s, self._key)), self.address
        )

    async def complete(self, prompt: str | None = None, **options: Any) -> Answer:
        """Return the complete answer; takes the arguments of `generate`."""
        return await self.generate(prompt, **options).complete()

    async def models(self) -> list[str]:
        """Return the names of the served models."""
        try:
            listed = await self._stub.ListModels(
                gateway_pb2.ListModelsRequest(), timeout=10, metadata=self._key
            )
        except aio.AioRpcError as error:
            raise from_status(error.code(), error.details(), (), self.address) from None
        return [model.name for model in listed.models]

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _bearer(api_key: str) -> Metadata:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _timing(timeout_s: float | None, key: Metadata) -> dict[str, Any]:
    """The server keeps the timeout, so that what it has by then still comes."""
    if timeout_s is None:
        return {"metadata": key}
    return {
        "timeout": max(0.0, timeout_s) + GRACE_S,
        "metadata": (*key, (TIMEOUT_KEY, f"{timeout_s:g}")),
    }

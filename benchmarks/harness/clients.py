"""Clients that load a running system and count the tokens that reach them."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from grpc import aio

from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.runtime.channel import connect

Prompts = Sequence[Sequence[int]]
Ask = Callable[[Sequence[int], int], Awaitable[int]]
COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


class GrpcClient:
    """Gateway.Generate, one channel, a stream a request."""

    def __init__(self, address: str):
        self._channel: aio.Channel = connect(address)
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)

    async def ask(self, prompt: Sequence[int], output_tokens: int) -> int:
        made = 0
        async for response in self._stub.Generate(_request(prompt, output_tokens)):
            made += len(response.token_ids)
        return made

    async def ttft_s(self, prompt: Sequence[int]) -> float:
        """Until the first token is here."""
        began = time.perf_counter()
        call = self._stub.Generate(_request(prompt, 1))
        async for response in call:
            if response.token_ids:
                break
        elapsed = time.perf_counter() - began
        async for _ in call:
            pass
        return elapsed

    async def token_times_s(self, prompt: Sequence[int], output_tokens: int) -> list[float]:
        """When each token of the answer was here, by the monotonic clock."""
        times: list[float] = []
        async for response in self._stub.Generate(_request(prompt, output_tokens)):
            times += [time.perf_counter()] * len(response.token_ids)
        return times

    async def close(self) -> None:
        await self._channel.close()


def _request(prompt: Sequence[int], output_tokens: int) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt_tokens=gateway_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.Sampling(temperature=0.0, max_tokens=output_tokens, ignore_eos=True),
    )


class HttpClient:
    """/v1/completions with server-sent events, a connection a request, read as bytes."""

    def __init__(self, url: str, model: str = "demo"):
        parts = urlsplit(url)
        self._host, self._port, self._model = parts.hostname or "", parts.port or 80, model

    async def ask(self, prompt: Sequence[int], output_tokens: int) -> int:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(self._head_and_body(prompt, output_tokens))
        tail = b""
        while data := await reader.read(65_536):
            tail = (tail + data)[-2_048:]
        writer.close()
        found = COMPLETION_TOKENS.findall(tail)
        if not found:
            raise RuntimeError(f"no usage at the end of the answer: {tail[-200:]!r}")
        return int(found[-1])

    def _head_and_body(self, prompt: Sequence[int], output_tokens: int) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + body


async def tokens_per_s(ask: Ask, prompts: Prompts, output_tokens: int) -> float:
    """All prompts at once; tokens received over the time until the last answer ended."""
    began = time.perf_counter()
    made = sum(await asyncio.gather(*(ask(prompt, output_tokens) for prompt in prompts)))
    elapsed = time.perf_counter() - began
    if made != output_tokens * len(prompts):
        raise RuntimeError(f"{made} tokens came, not all that were asked for")
    return made / elapsed

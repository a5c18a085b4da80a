"""Clients that load a running system and count the tokens that reach them."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence

from grpc import aio

from foretoken.bench.client import Server
from foretoken.bench.samples import Sample
from protos.generated import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.runtime.channel import connect

Prompts = Sequence[Sequence[int]]
Ask = Callable[[Sequence[int], int], Awaitable[int]]


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
        """Time until the first token arrives."""
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
        """Arrival time of each token, on the monotonic clock."""
        times: list[float] = []
        async for response in self._stub.Generate(_request(prompt, output_tokens)):
            times += [time.perf_counter()] * len(response.token_ids)
        return times

    async def close(self) -> None:
        await self._channel.close()


def _request(prompt: Sequence[int], output_tokens: int) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt_tokens=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.Sampling(temperature=0.0, max_tokens=output_tokens, ignore_eos=True),
    )


class HttpClient:
    """/v1/completions with server-sent events."""

    def __init__(self, url: str, model: str = "demo"):
        self._server, self._model = Server(url), model

    async def ask(self, prompt: Sequence[int], output_tokens: int) -> int:
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
        sample = Sample(0.0)
        await self._server.stream("/v1/completions", body, sample, 0.0)
        if sample.problem or not sample.has_usage:
            raise RuntimeError(f"no usage at the end of the answer: {sample.problem}")
        return sample.output_tokens


async def tokens_per_s(ask: Ask, prompts: Prompts, output_tokens: int) -> float:
    """All prompts at once; tokens received over the time until the last answer ended."""
    began = time.perf_counter()
    made = sum(await asyncio.gather(*(ask(prompt, output_tokens) for prompt in prompts)))
    elapsed = time.perf_counter() - began
    if made != output_tokens * len(prompts):
        raise RuntimeError(f"{made} tokens came, not all that were asked for")
    return made / elapsed

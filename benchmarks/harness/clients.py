"""Clients that load a running system and count the tokens they receive."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence

from grpc import aio

from benchmarks.harness.throughput import Prompts, tokens_per_s
from foretoken.bench.client import Server
from foretoken.bench.samples import Sample
from foretoken.client.client import RETRIES
from protos.generated import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.runtime.network.channel import OPTIONS, connect

Generate = Callable[[Sequence[int], int], Awaitable[int]]  # prompt, output tokens → tokens received


class GrpcClient:
    """Gateway.Generate on one channel, one stream per request."""

    def __init__(self, address: str):
        self._channel: aio.Channel = connect(address, (*OPTIONS, *RETRIES))
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)

    async def generate(self, prompt: Sequence[int], output_tokens: int) -> int:
        return len(await self.token_times_s(prompt, output_tokens))

    async def ttft_s(self, prompt: Sequence[int]) -> float:
        """Returns the time until the first token arrives."""
        began_s = time.perf_counter()
        return (await self.token_times_s(prompt, 1))[0] - began_s

    async def token_times_s(self, prompt: Sequence[int], output_tokens: int) -> list[float]:
        """Returns the arrival time of each token, on the monotonic clock."""
        request = gateway_pb2.GenerateRequest(
            prompt_tokens=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.Sampling(
                temperature=0.0, max_tokens=output_tokens, ignore_eos=True
            ),
        )
        times_s: list[float] = []
        async for response in self._stub.Generate(request):
            times_s += [time.perf_counter()] * len(response.token_ids)
        return times_s

    async def close(self) -> None:
        await self._channel.close()


class HttpClient:
    """/v1/completions with server-sent events."""

    def __init__(self, url: str, model: str = "demo"):
        self._server, self._model = Server(url), model

    async def generate(self, prompt: Sequence[int], output_tokens: int) -> int:
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
            raise RuntimeError(f"the answer ended without usage: {sample.problem}")
        return sample.output_tokens


async def measure_throughput(generate: Generate, prompts: Prompts, output_tokens: int) -> float:
    """Sends all prompts at once; returns the tokens received per second until the last answer
    ended."""
    began_s = time.perf_counter()
    tokens = sum(await asyncio.gather(*(generate(prompt, output_tokens) for prompt in prompts)))
    elapsed_s = time.perf_counter() - began_s
    return tokens_per_s("the system", tokens, prompts, output_tokens, elapsed_s)

"""A streaming gRPC client for foretoken servers; measures what `client.Server` measures."""

import asyncio
import time

from foretoken.bench.prompts import Prompt, Writer
from foretoken.bench.samples import STOPPED, TIMED_OUT, TRUNCATED, Sample
from foretoken.client.answers import RequestOptions, make_request
from foretoken.client.client import AsyncClient
from foretoken.client.errors import ForetokenError
from protos.generated import gateway_pb2


class GrpcWriter(Writer):
    """Encodes requests of one model as GenerateRequest."""

    def body(self, prompt: Prompt) -> tuple[str, bytes]:
        """Returns an empty path and the message. Raises ValueError for a part that is not text."""
        options: RequestOptions = {"temperature": self.temperature, "ignore_eos": self.ignore_eos}
        if prompt.max_tokens is not None:
            options["max_tokens"] = prompt.max_tokens
        messages = prompt.messages if prompt.prompt is None else None
        try:
            request = make_request(prompt.prompt, messages, None, self.model, None, options)
        except TypeError as error:
            raise ValueError(f"a prompt cannot be sent over gRPC: {error}") from None
        return "", request.SerializeToString()


class GrpcServer:
    """One server and its channel. Use and close it within a running event loop."""

    writer = GrpcWriter

    def __init__(self, address: str, api_key: str = ""):
        self.address = address
        self._client = AsyncClient(address, api_key)

    async def models(self) -> list[str]:
        """Returns the names of the served models. Raises ForetokenError."""
        return await self._client.models()

    async def stream(
        self, path: str, body: bytes, sample: Sample, started: float, timeout_s: float | None = None
    ) -> None:
        """Sends a body of `GrpcWriter` and records its answer in `sample`.

        Does what `client.Server.stream` does; `path` is not used.
        """
        request = gateway_pb2.GenerateRequest.FromString(body)
        if sample.sla_class:
            request.sla.name = sample.sla_class
        stream = self._client.send(request)
        sample.sent_s = time.perf_counter() - started
        try:
            async with asyncio.timeout(timeout_s):
                async for chunk in stream:
                    now_s = time.perf_counter() - started
                    if chunk.text:
                        sample.text_s.append(now_s)
                    if chunk.finish_reason:
                        sample.finish_reason, sample.end_s = chunk.finish_reason.value, now_s
        except TimeoutError:
            sample.problem = TIMED_OUT
        except ForetokenError as error:
            sample.problem = str(error)
        except asyncio.CancelledError:
            sample.problem = STOPPED
            raise
        finally:
            sample.end_s = sample.end_s or time.perf_counter() - started
            if stream.usage:
                sample.prompt_tokens = stream.usage.prompt_tokens
                sample.output_tokens = stream.usage.completion_tokens
                sample.has_usage = True
            else:
                sample.output_tokens = len(sample.text_s)
            if not (sample.problem or sample.finish_reason):
                sample.problem = TRUNCATED

    async def close(self) -> None:
        await self._client.close()

"""A streaming gRPC client for foretoken servers; measures what `client.Server` measures."""

import asyncio
import time

from foretoken.bench.samples import STOPPED, TIMED_OUT, TRUNCATED, Sample
from foretoken.client.client import AsyncClient
from foretoken.client.errors import ForetokenError
from protos.generated import gateway_pb2


class GrpcServer:
    """One server and its channel. Use and close it within a running event loop."""

    over_grpc = True

    def __init__(self, address: str, api_key: str = ""):
        self.address = address
        self._client = AsyncClient(address, api_key)

    async def models(self) -> list[str]:
        """Returns the names of the served models. Raises ForetokenError."""
        return await self._client.models()

    async def stream(
        self, path: str, body: bytes, sample: Sample, started: float, timeout_s: float | None = None
    ) -> None:
        """Sends a request and records its answer in `sample`, as `client.Server.stream` does.

        `body` is an encoded GenerateRequest; `path` is not used.
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

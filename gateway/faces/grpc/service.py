"""The gateway's gRPC service: decode, call, encode."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, cast

from gateway.admission.deadline import within_deadline
from gateway.faces.grpc.authentication import KeyInterceptor
from gateway.faces.grpc.decode import decode_request, read_sla_class
from gateway.faces.grpc.metadata import read_key, read_metadata, read_timeout, set_caller
from gateway.front import Front
from gateway.request_tracing import RequestTrace
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk
from gateway.types.forecasts import ClientForecast
from observability import genai
from protos.generated import gateway_pb2, gateway_pb2_grpc, scheduler_pb2
from services.runtime.codecs.common import encode_reason
from services.runtime.server import Mount

SERVICE_NAME = "foretoken.v1.Gateway"
GENERATE = f"/{SERVICE_NAME}/Generate"
RPC = {"rpc.system": "grpc", "rpc.method": GENERATE[1:]}


class GatewayService(gateway_pb2_grpc.GatewayServicer):
    """Serves the calls of a running front."""

    def __init__(self, front: Front):
        self._front = front

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        metadata = await self._authenticate(context)
        chat = request.WhichOneof("input") == "chat"
        operation = genai.CHAT if chat else genai.TEXT_COMPLETION
        trace = self._front.tracer.begin(operation, metadata, RPC)
        with trace.ends_on_error():
            gateway = self._front.select(request.model)
            trace.on_model(gateway.config.model_name)
            choices = max(1, min(request.sampling.n, gateway.config.max_choices))
            sla_class = read_sla_class(request.sla)
            arrival = gateway.intake.admit(read_timeout(context, metadata), choices, sla_class)
            async with within_deadline(arrival):
                await gateway.intake.wait_for_turn(sla_class)
                client_request = decode_request(request)
                generation_request = await gateway.intake.parse(client_request, arrival, trace)
            call = await gateway.open([generation_request], trace=trace)
            context.add_done_callback(lambda _: _close(call, trace))
            if call.grant is not None:
                headers = call.grant.usage.headers(time.monotonic())
                context.set_trailing_metadata(tuple(headers.items()))
            async with aclosing(call.chunks()) as chunks:
                async for chunk in chunks:
                    yield _encode_chunk(call, chunk)
                    trace.on_chunk_sent()
            yield gateway_pb2.GenerateResponse(
                request_id=call.answer_id,
                usage=gateway_pb2.Usage(
                    prompt_tokens=call.prompt_tokens,
                    completion_tokens=call.completion_tokens,
                    cached_tokens=call.cached_tokens,
                ),
            )
            trace.end()

    async def _authenticate(self, context: Any) -> Mapping[str, str]:
        """The call's metadata. Checks the API key and sets the caller of the present task."""
        metadata = read_metadata(context)
        key_name = self._front.keyring.check(read_key(metadata))
        await set_caller(context, metadata, key_name, self._front.config.system_fingerprint)
        return metadata

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Any
    ) -> gateway_pb2.ListModelsResponse:
        await self._authenticate(context)
        models = [
            gateway_pb2.Model(
                name=name, max_context_tokens=gateway.max_context_tokens, warnings=gateway.warnings
            )
            for served, gateway in self._front.gateways.items()
            for name in (served, *gateway.adapters)
        ]
        return gateway_pb2.ListModelsResponse(models=models)

    async def Why(
        self, request: scheduler_pb2.WhyRequest, context: Any
    ) -> scheduler_pb2.WhyResponse:
        await self._authenticate(context)
        return await self._front.why(request.request_id)


def mount(front: Front) -> Mount:
    """The service for `services.runtime.server`."""
    add = gateway_pb2_grpc.add_GatewayServicer_to_server
    return Mount(SERVICE_NAME, add, GatewayService(front), [KeyInterceptor(front.keyring)])


def _close(call: ClientCall, trace: RequestTrace) -> None:
    call.close()
    trace.end()
    call.forget()


def _encode_chunk(call: ClientCall, chunk: ChoiceChunk) -> gateway_pb2.GenerateResponse:
    return gateway_pb2.GenerateResponse(
        request_id=call.answer_id,
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=cast(Any, chunk.logprobs),
        finish_reason=encode_reason(chunk.reason),
        forecast=_encode_forecast(chunk.forecast) if chunk.forecast else None,
        prompt_logprobs=cast(Any, chunk.prompt_logprobs),
    )


def _encode_forecast(forecast: ClientForecast) -> gateway_pb2.ClientForecast:
    return gateway_pb2.ClientForecast(
        expected_tokens=forecast.expected_tokens,
        low_tokens=forecast.low_tokens,
        high_tokens=forecast.high_tokens,
        end_s=forecast.end_s,
        ttft_s=forecast.ttft_s,
        sla_expected=forecast.sla_expected,
    )

"""The gateway's gRPC face: parse, call, encode."""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, cast

from gateway.admission.keyed_calls import KeyedCalls
from gateway.gateway import Gateway
from gateway.observed.traces import Trace
from gateway.registration import add_to_server
from gateway.requests.metadata import class_of, greet, key_of, metadata_of, timeout_s
from gateway.sessions.call import ClientCall
from gateway.sessions.foresight import Foreseen
from gateway.sessions.session import ChoiceChunk
from observability import genai
from protos.generated import gateway_pb2, gateway_pb2_grpc, scheduler_pb2
from services.runtime.codecs.common import encode_reason
from services.runtime.errors import InvalidArgument
from services.runtime.server import Mount

SERVICE_NAME = "foretoken.v1.Gateway"
RPC = {"rpc.system": "grpc", "rpc.method": f"{SERVICE_NAME}/Generate"}


class GatewayService(gateway_pb2_grpc.GatewayServicer):
    """Takes calls for a gateway that runs."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway

    async def Generate(
        self, request: gateway_pb2.GenerateRequest | None, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        metadata = await self._greet(context)
        if request is None:
            raise InvalidArgument("", "the request is no valid GenerateRequest: bad UTF-8 or wire")
        chat = request.WhichOneof("input") == "chat"
        trace = self._gateway.traces.begin(
            genai.CHAT if chat else genai.TEXT_COMPLETION, metadata, RPC
        )
        with trace.failing():
            choices = max(1, min(request.sampling.n, self._gateway.config.max_choices))
            sla_class = class_of(request.sla)
            clock = self._gateway.admit(timeout_s(context, metadata), choices, sla_class)
            await self._gateway.take_turn(sla_class)
            call = self._gateway.open(
                [await self._gateway.parse(request, clock, trace)], trace=trace
            )
            context.add_done_callback(lambda _: _close(call, trace))
            async with aclosing(call.chunks()) as chunks:
                async for chunk in chunks:
                    yield _encode(call, chunk)
                    trace.delivered()
            yield gateway_pb2.GenerateResponse(
                request_id=call.answer_id,
                usage=gateway_pb2.Usage(
                    prompt_tokens=call.prompt_tokens,
                    completion_tokens=call.completion_tokens,
                    cached_tokens=call.cached_tokens,
                ),
            )
            trace.end()

    async def _greet(self, context: Any) -> Mapping[str, str]:
        """What the call says beside its message; whose it is is known from here on."""
        metadata = metadata_of(context)
        await greet(context, metadata, self._gateway.keyring.check(key_of(metadata)))
        return metadata

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Any
    ) -> gateway_pb2.ListModelsResponse:
        await self._greet(context)
        model = gateway_pb2.Model(
            name=self._gateway.config.model_name,
            max_context_tokens=self._gateway.max_context_tokens,
        )
        return gateway_pb2.ListModelsResponse(models=[model])

    async def Why(
        self, request: scheduler_pb2.WhyRequest, context: Any
    ) -> scheduler_pb2.WhyResponse:
        await self._greet(context)
        return await self._gateway.why(request.request_id)


def mount(gateway: Gateway) -> Mount:
    """What `services.runtime.server` serves."""
    keys = KeyedCalls(gateway.keyring)
    return Mount(SERVICE_NAME, add_to_server, GatewayService(gateway), [keys])


def _close(call: ClientCall, trace: Trace) -> None:
    call.close()
    trace.end()


def _encode(call: ClientCall, chunk: ChoiceChunk) -> gateway_pb2.GenerateResponse:
    return gateway_pb2.GenerateResponse(
        request_id=call.answer_id,
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=cast(Any, chunk.logprobs),
        finish_reason=encode_reason(chunk.reason),
        forecast=_encode_foreseen(chunk.forecast) if chunk.forecast else None,
        prompt_logprobs=cast(Any, chunk.prompt_logprobs),
    )


def _encode_foreseen(seen: Foreseen) -> gateway_pb2.Foreseen:
    return gateway_pb2.Foreseen(
        expected_tokens=seen.expected_tokens,
        low_tokens=seen.low_tokens,
        high_tokens=seen.high_tokens,
        end_s=seen.end_s,
        ttft_s=seen.ttft_s,
        sla_expected=seen.sla_expected,
    )

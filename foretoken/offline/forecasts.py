"""Asks the predictor for the expected lengths of answers before their requests are submitted."""

import logging
from collections.abc import Sequence
from uuid import uuid4

from grpc import aio

from gateway.types.generation import GenerationRequest
from protos.generated import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.runtime.codecs.common import decode_forecast

log = logging.getLogger(__name__)

MAX_PER_CALL = 1_024  # the predictor's limit
TIMEOUT_S = 30.0  # of one call


async def expected_tokens(
    predictor: aio.Channel, requests: Sequence[GenerationRequest]
) -> list[float]:
    """The mean length of each answer, at most its max_tokens; that limit itself for all if the
    predictor does not answer."""
    stub = predictor_pb2_grpc.PredictorStub(predictor)
    job = uuid4().hex
    means: list[float] = []
    try:
        for begin in range(0, len(requests), MAX_PER_CALL):
            part = requests[begin : begin + MAX_PER_CALL]
            inputs = [_encode(f"{job}-{begin + at}", each) for at, each in enumerate(part)]
            asked = predictor_pb2.ForecastRequest(inputs=inputs)
            response = await stub.Forecast(asked, timeout=TIMEOUT_S)
            means += [
                decode_forecast(message, each.sampling.max_tokens).mean(
                    most=each.sampling.max_tokens
                )
                for message, each in zip(response.forecasts, part, strict=True)
            ]
    except (aio.AioRpcError, ValueError) as error:
        log.warning("no forecasts for the order of the requests: %s", error)
        return [float(each.sampling.max_tokens) for each in requests]
    return means


def _encode(request_id: str, request: GenerationRequest) -> predictor_pb2.ForecastInput:
    return predictor_pb2.ForecastInput(
        request_id=request_id,
        model=request.client.model,
        application=request.client.application,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.sampling.max_tokens,
        text=common_pb2.PromptText(
            instruction=request.instruction,
            user_input=request.user_input,
            answer_tokens=request.answer_tokens,
        ),
    )

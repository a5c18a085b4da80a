"""Grammars of gRPC clients."""

from random import Random

import pytest
from grpc import StatusCode, aio

from protos.generated import common_pb2, gateway_pb2, gateway_pb2_grpc
from protos.generated.worker_pb2 import Prompt
from tests.gateway.gateway_fakes import demo_text, run_harness
from tests.gateway.grammars.walks import draw_answer


def draw(prompt: Prompt) -> list[int]:
    return demo_text().encode(draw_answer(prompt.sampling.grammar, Random(1)) or "")


async def generate(address: str, grammar: str) -> str:
    request = gateway_pb2.GenerateRequest(
        prompt="a", sampling=common_pb2.Sampling(grammar=grammar, max_tokens=50)
    )
    async with aio.insecure_channel(address) as channel:
        stream = gateway_pb2_grpc.GatewayStub(channel).Generate(request)
        return "".join([response.text async for response in stream])


async def test_grammar_of_a_grpc_client_constrains_its_answer() -> None:
    async with run_harness(draw) as harness:
        lark = 'start: "n=" %json {"type": "integer", "minimum": 10, "maximum": 99}'
        name, number = (await generate(harness.grpc_address, lark)).split("=")
        assert name == "n" and 10 <= int(number) <= 99
        assert await generate(harness.grpc_address, 'root ::= "yes"') == "yes"


async def test_wrong_grammar_of_a_grpc_client_is_invalid() -> None:
    async with run_harness(draw) as harness:
        with pytest.raises(aio.AioRpcError) as error:
            await generate(harness.grpc_address, "start: missing")
        assert error.value.code() is StatusCode.INVALID_ARGUMENT
        assert "sampling.grammar: cannot be enforced" in (error.value.details() or "")
        assert not harness.worker.prompts

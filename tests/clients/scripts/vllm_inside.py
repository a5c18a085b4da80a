"""Sends many requests to vLLM's engine in this process, and prints what came back as JSON.

    python vllm_inside.py MODEL PROMPTS SCHEDULER MODE COUNT IN_FLIGHT BLOCKS MAX_TOKENS SECONDS

PROMPTS: N JSON lines, each a chat rendered as text. SCHEDULER: of `--scheduler-cls`, or `own`.
MODE: `sync`; or `async`, which schedules a step while the one before it runs. Request k is equal
to request k + N. Every tenth is cancelled after some tokens; others have two answers, a pattern, a
JSON schema, or a seed. None is sent after SECONDS. The memory of BLOCKS blocks of 32 tokens is far
less than IN_FLIGHT requests need, so that vLLM preempts. In mode `sync`, all running requests are
preempted at once after a third of the answers; in mode `async` this would discard draws of seeded
requests. With FORETOKEN_VLLM_METRICS_PORT, foretoken's metrics are printed, too.
"""

import asyncio
import json
import os
import sys
import time
import urllib.request
from itertools import islice, takewhile
from pathlib import Path

from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

REQUEST_S = 300.0
PATTERN = StructuredOutputsParams(regex="[a-z]{1,3}( [0-9]{1,3}){2,6}")
SCHEMA = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4},
        },
        "required": ["name", "tags"],
    }
)


def parameters(number: int, most: int) -> SamplingParams:
    match number % 20:
        case 3:
            return SamplingParams(temperature=0.9, seed=number, max_tokens=most, n=2)
        case 7:
            return SamplingParams(temperature=0.0, max_tokens=most, structured_outputs=PATTERN)
        case 11:
            return SamplingParams(temperature=0.9, seed=number, max_tokens=most)
        case 15:
            return SamplingParams(temperature=0.0, max_tokens=most, structured_outputs=SCHEMA)
        case _:
            return SamplingParams(temperature=0.0, max_tokens=most)


def cancelled_after(number: int) -> int:
    """Tokens after which the client leaves; 0: it stays."""
    return 1 + number % 7 if number % 10 == 9 else 0


async def send(
    engine: AsyncLLM, number: int, texts: list[str], max_tokens: int
) -> list[list[int]] | None:
    """The token ids of the answers; None if it was cancelled."""
    most = cancelled_after(number)
    answers: dict[int, list[int]] = {}  # by index: an output has those that have grown
    finished = False
    kind = number % len(texts)
    stream = engine.generate(texts[kind], parameters(kind, max_tokens), f"r{number}")
    async with asyncio.timeout(REQUEST_S):
        async for output in stream:
            answers |= {each.index: list(each.token_ids) for each in output.outputs}
            finished = output.finished
            if most and len(answers[0]) >= most and not finished:
                return None
    assert finished
    return [answers[index] for index in sorted(answers)]


def start(model: str, scheduler: str, mode: str, blocks: int) -> AsyncLLM:
    config = AsyncEngineArgs(
        model=model,
        dtype="float32",
        block_size=32,
        num_gpu_blocks_override=blocks,
        max_num_seqs=64,
        max_model_len=512,
        enable_prefix_caching=True,
        enforce_eager=True,  # compiling takes longer than all requests
        scheduler_cls=None if scheduler == "own" else scheduler,
    ).create_engine_config()
    # vLLM turns it off on CPUs because they gain nothing from it; its engine and runner have it.
    config.scheduler_config.async_scheduling = mode == "async"
    return AsyncLLM.from_vllm_config(config)


async def main(model: str, texts: list[str], scheduler: str, mode: str, *numbers: str) -> None:
    count, in_flight, blocks, max_tokens, seconds = map(int, numbers)
    engine = start(model, scheduler, mode, blocks)
    answers: list[list[list[int]] | None] = [None] * count
    failed: dict[int, str] = {}
    end_s = time.monotonic() + seconds
    sendable = takewhile(lambda _: time.monotonic() < end_s, range(count))
    left, third = iter(sendable), asyncio.Event()
    sent = 0

    async def client() -> None:
        nonlocal sent
        for number in left:
            sent += 1
            try:
                answers[number] = await send(engine, number, texts, max_tokens)
                if number >= count // 3:
                    third.set()
            except Exception as error:
                failed[number] = repr(error)
                third.set()
                if engine.errored:
                    return
        third.set()  # also if time has run out before

    async def reset() -> None:
        """Preempts all running requests."""
        await third.wait()
        await engine.reset_prefix_cache(reset_running_requests=True)

    try:
        async with asyncio.TaskGroup() as tasks:
            if mode == "sync":
                tasks.create_task(reset())
            for _ in islice(range(count), in_flight):
                tasks.create_task(client())
        await send(engine, count, texts, max_tokens)  # its statistics come after all others
        print(
            json.dumps(
                {
                    "answers": answers,
                    "sent": sent,
                    "failed": failed,
                    "alive": not engine.errored,
                    "preemptions": total("vllm:num_preemptions_total"),
                    "kv_in_use": total("vllm:kv_cache_usage_perc"),
                    "metrics": read_metrics(),
                }
            )
        )
    finally:
        engine.shutdown()


def read_metrics() -> str:
    port = os.environ.get("FORETOKEN_VLLM_METRICS_PORT")
    if not port:
        return ""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        return page.read().decode()


def total(name: str) -> float:
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name
    )


if __name__ == "__main__":
    model, prompts, *others = sys.argv[1:]
    texts = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    asyncio.run(main(model, texts, *others))

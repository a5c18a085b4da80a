"""Sends many requests to vLLM's engine in this process, and prints what came back as JSON.

    python vllm_inside.py MODEL PROMPTS SCHEDULER COUNT IN_FLIGHT BLOCKS

PROMPTS: JSON lines, each a chat rendered as text. SCHEDULER: of `--scheduler-cls`, or `own`.
Request k takes prompt k; every tenth is cancelled after some tokens, others have two answers, a
pattern, or a seed. After a third of the answers all running requests are preempted at once. The
memory of BLOCKS blocks of 32 tokens is far less than IN_FLIGHT requests need, so that vLLM
preempts.
"""

import asyncio
import json
import sys
from itertools import islice
from pathlib import Path

from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

MAX_TOKENS = 200
REQUEST_S = 300.0


def parameters(number: int) -> SamplingParams:
    match number % 20:
        case 3:
            return SamplingParams(temperature=0.9, seed=number, max_tokens=MAX_TOKENS, n=2)
        case 7:
            pattern = StructuredOutputsParams(regex="[a-z]{1,3}( [0-9]{1,3}){2,6}")
            return SamplingParams(
                temperature=0.0, max_tokens=MAX_TOKENS, structured_outputs=pattern
            )
        case 11:
            return SamplingParams(temperature=0.9, seed=number, max_tokens=MAX_TOKENS)
        case _:
            return SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


def cancelled_after(number: int) -> int:
    """Tokens after which the client leaves; 0: it stays."""
    return 1 + number % 7 if number % 10 == 9 else 0


async def send(engine: AsyncLLM, number: int, prompt: str) -> list[list[int]] | None:
    """The token ids of the answers; None if it was cancelled."""
    most = cancelled_after(number)
    answers: dict[int, list[int]] = {}  # by index: an output has those that have grown
    finished = False
    async with asyncio.timeout(REQUEST_S):
        async for output in engine.generate(prompt, parameters(number), f"r{number}"):
            answers |= {each.index: list(each.token_ids) for each in output.outputs}
            finished = output.finished
            if most and len(answers[0]) >= most and not finished:
                return None
    assert finished
    return [answers[index] for index in sorted(answers)]


async def main(model: str, texts: list[str], scheduler: str, *numbers: str) -> None:
    count, in_flight, blocks = map(int, numbers)
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            block_size=32,
            num_gpu_blocks_override=blocks,
            max_num_seqs=64,
            max_model_len=512,
            enable_prefix_caching=True,
            scheduler_cls=None if scheduler == "own" else scheduler,
        )
    )
    answers: list[list[list[int]] | None] = [None] * count
    failed: dict[int, str] = {}
    left, third = iter(range(count)), asyncio.Event()

    async def client() -> None:
        for number in left:
            try:
                answers[number] = await send(engine, number, texts[number % len(texts)])
                if number >= count // 3:
                    third.set()
            except Exception as error:
                failed[number] = repr(error)
                third.set()
                if engine.errored:
                    return

    async def reset() -> None:
        """Preempts all running requests."""
        await third.wait()
        await engine.reset_prefix_cache(reset_running_requests=True)

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reset())
            for _ in islice(range(count), in_flight):
                tasks.create_task(client())
        await asyncio.sleep(1.0)
        print(
            json.dumps(
                {
                    "answers": answers,
                    "failed": failed,
                    "alive": not engine.errored,
                    "preemptions": total("vllm:num_preemptions_total"),
                }
            )
        )
    finally:
        engine.shutdown()


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

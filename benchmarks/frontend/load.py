"""The load of the front end: an open loop of chats with answers of known lengths."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from benchmarks.overload.demo_load import DueRequest
from foretoken.bench.client import Server
from foretoken.bench.samples import Sample
from models.words import WORDS

PATH = "/v1/chat/completions"
MEAN_TOKENS, SIGMA = 67.0, 1.0  # of the lognormal lengths
PROMPT_WORDS = (16, 64)
NORMAL = NormalDist()


@dataclass(frozen=True)
class Received:
    """What the clients of a load received. An event is a server-sent event with text."""

    requests: int
    tokens: int
    events: int
    ttft_s: Sequence[float]


def answer_lengths(count: int, mean: float = MEAN_TOKENS, sigma: float = SIGMA) -> list[int]:
    """Quantiles of a lognormal distribution, ascending, so that every load has the same tokens; at
    least 1 each. Their mean is close to `mean`."""
    median = mean / np.exp(sigma**2 / 2)
    scores = [NORMAL.inv_cdf((i + 0.5) / count) for i in range(count)]
    return [max(1, round(median * float(np.exp(sigma * score)))) for score in scores]


def fixed_load(count: int, rate: float, seed: int, model: str = "demo") -> list[DueRequest]:
    """Poisson arrivals of `rate` per second, of chats with the lengths of `answer_lengths` in
    random order. The end of an answer is ignored and special tokens are visible: every token has
    text."""
    rng = np.random.default_rng(seed)
    lengths = rng.permutation(answer_lengths(count)).tolist()
    due_s = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    return [
        DueRequest(due, fixed_body(_prompt(rng), length, model))
        for due, length in zip(due_s, lengths, strict=True)
    ]


def fixed_body(prompt: str, tokens: int, model: str = "demo") -> bytes:
    """A chat with a streamed answer of exactly so many tokens."""
    return json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


async def send(url: str, load: Sequence[DueRequest], timeout_s: float) -> Received:
    """Sends requests when they are due. Raises RuntimeError if an answer is not complete."""
    server = Server(url)
    began_s = time.perf_counter()
    samples = [Sample(request.due_s) for request in load]
    async with asyncio.TaskGroup() as group:
        for request, sample in zip(load, samples, strict=True):
            if (wait_s := began_s + request.due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(server.stream(PATH, request.body, sample, began_s, timeout_s))
    await server.close()
    if problems := {sample.problem for sample in samples if sample.problem}:
        raise RuntimeError(f"requests failed: {', '.join(sorted(problems))}")
    return Received(
        len(samples),
        sum(sample.output_tokens for sample in samples),
        sum(len(sample.text_s) for sample in samples),
        [sample.ttft_s for sample in samples],
    )


def _prompt(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, int(rng.integers(*PROMPT_WORDS))))

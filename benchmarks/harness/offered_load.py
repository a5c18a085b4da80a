"""An offered load: requests with arrival times, and what their clients saw."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

TokenTimes = Callable[[Sequence[int], int], Awaitable[list[float]]]  # prompt, output tokens


@dataclass(frozen=True)
class Asked:
    """One request of a load."""

    after_s: float
    prompt: list[int]
    output_tokens: int

    @property
    def footprint_tokens(self) -> int:
        """KV at its end."""
        return len(self.prompt) + self.output_tokens


@dataclass(frozen=True)
class Seen:
    """Its tokens' times, from its arrival on."""

    token_s: list[float]

    @property
    def normalised_latency_s(self) -> float:
        """End-to-end time per token (ALISE's measure)."""
        return self.token_s[-1] / len(self.token_s)

    @property
    def gaps_s(self) -> list[float]:
        """Time between tokens; 0 within a message that brought several."""
        return np.diff(self.token_s).tolist()


def bimodal(requests: int, rate: float, seed: int) -> list[Asked]:
    """Poisson arrivals of `rate` a second; two of three answers short, the third long."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests))
    long = rng.random(requests) < 1 / 3
    outputs = np.where(long, rng.integers(512, 1_024, requests), rng.integers(16, 64, requests))
    prompts = rng.integers(64, 256, requests)
    return [
        Asked(float(at), rng.integers(40, 240, int(prompt)).tolist(), int(output))
        for at, prompt, output in zip(arrivals, prompts, outputs, strict=True)
    ]


async def offer(load: Sequence[Asked], token_times: TokenTimes) -> tuple[list[Seen], float]:
    """Sends each request at its time; returns the observations and the total duration."""
    began = time.perf_counter()

    async def one(asked: Asked) -> Seen:
        await asyncio.sleep(began + asked.after_s - time.perf_counter())
        arrived = time.perf_counter()
        times = await token_times(asked.prompt, asked.output_tokens)
        if len(times) != asked.output_tokens:
            raise RuntimeError(f"{len(times)} tokens of {asked.output_tokens} came")
        return Seen([at - arrived for at in times])

    seen = await asyncio.gather(*(one(asked) for asked in load))
    return list(seen), time.perf_counter() - began

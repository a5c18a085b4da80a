"""An open loop over HTTP: sends requests when they are due and records their streams."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.overload.demo_load import DueRequest
from foretoken.bench.client import Server
from foretoken.bench.samples import STOPPED, TIMED_OUT, TRUNCATED, Sample

PATH = "/v1/chat/completions"
REFUSED = "429"


@dataclass(frozen=True)
class Answer:
    """The result of a request, in seconds from the start of the load.

    gap_s: the longest gap between two arrivals of text. problem: empty if the whole answer arrived;
    else an HTTP status, the message of an error event, or a reason of `foretoken.bench.samples`.
    With a problem, times and tokens are 0.
    """

    due_s: float
    first_s: float
    last_s: float
    tokens: int
    problem: str = ""
    gap_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean time between two tokens; 0 for an answer of one token."""
        return (self.last_s - self.first_s) / max(self.tokens - 1, 1)

    @property
    def normalised_latency_s(self) -> float:
        """End-to-end time per token (ALISE, Zhao et al., 2024)."""
        return (self.last_s - self.due_s) / self.tokens


async def send_load(url: str, load: Sequence[DueRequest], timeout_s: float) -> list[Answer]:
    """Returns the result of each request, in the load's order. Requests that have not ended
    `timeout_s` after the last one was sent are disconnected."""
    server = Server(url)
    began_s = time.perf_counter()
    tasks, samples = [], [Sample(request.due_s) for request in load]
    for request, sample in zip(load, samples, strict=True):
        if (wait_s := began_s + request.due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        stream = server.stream(PATH, request.body, sample, began_s)
        tasks.append(asyncio.create_task(stream))
    _, unfinished = await asyncio.wait(tasks, timeout=timeout_s)
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.close()
    return list(map(_answer, samples))


def _answer(sample: Sample) -> Answer:
    if problem := _problem(sample):
        return Answer(sample.due_s, 0.0, 0.0, 0, problem)
    first_s = sample.due_s + sample.ttft_s
    return Answer(
        sample.due_s, first_s, sample.end_s, sample.output_tokens, gap_s=sample.longest_gap_s
    )


def _problem(sample: Sample) -> str:
    if sample.problem == STOPPED:
        return TIMED_OUT
    if sample.status not in (0, 200):
        return str(sample.status)
    return sample.problem or ("" if sample.has_usage else TRUNCATED)

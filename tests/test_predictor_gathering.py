"""Micro-batching: who is extracted with whom, and who is spared whose trouble."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from services.predictor.encoder.encoder import Encoder
from services.predictor.encoder.extract import Extractor
from services.predictor.encoder.gathering import Busy, Gatherer, Recalls
from services.predictor.interface import LAYERS, Features, Prompt


class Slow:
    """Extracts when told to, and writes down its batches; fails on prompts that say so."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[str] = set()
        self.started = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.known: set[str] = set()

    def extract(self, texts: Sequence[Prompt]) -> list[Features]:
        self.batches.append([prompt.user_input for prompt in texts])
        self.threads.add(threading.current_thread().name)
        self.started.release()
        assert self.go.acquire(timeout=10)
        if any("bad" in prompt.user_input for prompt in texts):
            raise ValueError("no such prompt")
        return [self.features(prompt) for prompt in texts]

    def cached(self, prompt: Prompt) -> Features | None:
        return self.features(prompt) if prompt.user_input in self.known else None

    @staticmethod
    def features(prompt: Prompt) -> Features:
        numbers = np.full(6, prompt.prompt_tokens, np.float32)
        none = np.zeros((LAYERS, 0), np.float32)
        return Features(none, none, np.zeros(0, np.int32), numbers)

    async def starts(self) -> None:
        """Until the next batch is in the worker."""
        assert await asyncio.to_thread(self.started.acquire, timeout=10)


def asked(gatherer: Gatherer, text: str, tokens: int = 0) -> "asyncio.Task[Features]":
    return asyncio.create_task(gatherer.extract(Prompt("", text, tokens)))


@asynccontextmanager
async def serving(gatherer: Gatherer, slow: Slow | None = None) -> AsyncIterator[asyncio.Task]:
    async with asyncio.TaskGroup() as group:
        loop = group.create_task(gatherer.run())
        try:
            yield loop
        finally:
            if slow:
                slow.go.release(100)  # nothing is left standing in the thread
            loop.cancel()


async def test_a_lone_prompt_starts_at_once_and_those_behind_it_go_together() -> None:
    slow = Slow()
    gatherer = Gatherer(slow)
    async with serving(gatherer, slow):
        first = asked(gatherer, "a", 1)
        await slow.starts()
        rest = [asked(gatherer, text, i) for i, text in enumerate("bcd", 2)]
        await asyncio.sleep(0)
        slow.go.release(2)
        found = await asyncio.gather(first, *rest)
    assert slow.batches == [["a"], ["b", "c", "d"]]
    assert [features.numbers[0] for features in found] == [1, 2, 3, 4]
    assert slow.threads == {"foretoken-extract_0"}


async def test_callers_of_one_moment_are_one_batch_bounded_in_size() -> None:
    slow = Slow()
    gatherer = Gatherer(slow, most=4)
    async with serving(gatherer, slow):
        tasks = [asked(gatherer, str(i), i) for i in range(10)]
        slow.go.release(3)
        found = await asyncio.gather(*tasks)
    assert [len(batch) for batch in slow.batches] == [4, 4, 2]
    assert [features.numbers[0] for features in found] == list(range(10))


async def test_a_known_prompt_waits_for_nobody() -> None:
    slow = Slow()
    slow.known.add("known")
    gatherer = Gatherer(slow)
    async with serving(gatherer, slow):
        waiting = asked(gatherer, "new")
        await slow.starts()
        assert (await gatherer.extract(Prompt("", "known", 9))).numbers[0] == 9
        assert not waiting.done()
        slow.go.release()
        await waiting


async def test_a_full_queue_says_busy_and_empties_again() -> None:
    slow = Slow()
    gatherer = Gatherer(slow, queue_max=2)
    async with serving(gatherer, slow):
        running = asked(gatherer, "a")
        await slow.starts()
        queued = [asked(gatherer, text) for text in "bc"]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="2 prompts already wait"):
            await gatherer.extract(Prompt("", "d", 0))
        slow.go.release(3)
        await asyncio.gather(running, *queued)
        await gatherer.extract(Prompt("", "e", 0))


async def test_one_bad_prompt_fails_alone() -> None:
    slow = Slow()
    gatherer = Gatherer(slow)
    slow.go.release(100)
    async with serving(gatherer, slow):
        tasks = [asked(gatherer, text, 5) for text in ("good", "bad", "fine")]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in found] == [Features, ValueError, Features]
        assert (await gatherer.extract(Prompt("", "later", 6))).numbers[0] == 6
    assert slow.batches == [["good", "bad", "fine"], ["good"], ["bad"], ["fine"], ["later"]]


async def test_who_gives_up_takes_nobody_along_and_costs_nothing_in_the_queue() -> None:
    slow = Slow()
    gatherer = Gatherer(slow)
    async with serving(gatherer, slow):
        running = [asked(gatherer, text) for text in "ab"]
        await slow.starts()
        queued = [asked(gatherer, text) for text in "cd"]
        await asyncio.sleep(0)
        running[0].cancel()
        queued[0].cancel()
        await asyncio.sleep(0)
        slow.go.release(2)
        await asyncio.gather(running[1], queued[1])
    assert slow.batches == [["a", "b"], ["d"]]


async def test_at_the_end_everybody_is_told_and_the_thread_is_gone() -> None:
    slow = Slow()
    gatherer = Gatherer(slow)
    async with serving(gatherer, slow) as loop:
        tasks = [asked(gatherer, "a")]
        await slow.starts()
        tasks.append(asked(gatherer, "b"))
        await asyncio.sleep(0)
        slow.go.release()
        loop.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in found] == [Busy, Busy]
    assert slow.batches == [["a"]]
    assert not [t for t in threading.enumerate() if t.name.startswith("foretoken-extract")]
    with pytest.raises(Busy, match="closing"):
        await gatherer.extract(Prompt("", "c", 0))


async def test_with_the_real_encoder() -> None:
    extractor: Recalls = Extractor(Encoder.load())
    gatherer = Gatherer(extractor)
    prompts = [Prompt("Answer in one word.", f"What is {i} and {i}?", 9) for i in range(12)]
    async with serving(gatherer):
        found = await asyncio.gather(*map(gatherer.extract, prompts))
    alone = [Extractor(Encoder.load()).extract([prompts[i]])[0] for i in (0, 11)]
    for ours, theirs in zip((found[0], found[11]), alone, strict=True):
        np.testing.assert_allclose(ours.user_input, theirs.user_input, atol=1e-4)
        np.testing.assert_array_equal(ours.words, theirs.words)

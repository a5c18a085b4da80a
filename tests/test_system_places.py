"""Placement on the real stack, with two workers: requests go where their beginning is cached, and
who is moved is answered as if it had stayed."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import AsyncClient
from foretoken.answers import Chunk
from foretoken.client import AsyncStream
from services.policies.snapshot import CHAIN
from services.scheduler.eventlog import read
from services.scheduler.events import Place, Reported, SendPlan, WorkerAttached
from tests.live import serving

GREEDY: Any = {"temperature": 0.0, "ignore_eos": True}


def logged(path: Path, *settings: str) -> list[str]:
    words = [word for setting in settings for word in ("--set", setting)]
    return ["--workers", "2", *words, "--set", f"scheduler.event_log={path}"]


def places(path: Path) -> dict[str, list[str]]:
    """Where each request was placed, in the order of their coming."""
    found: dict[str, list[str]] = defaultdict(list)
    for entry in read(path):
        for action in entry.actions:
            if isinstance(action, Place):
                found[action.request_id].append(action.worker_id)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("place", ["prefix_aware", "max_min_prefix"])
async def test_a_prompt_goes_where_its_beginning_is(tmp_path: Path, place: str) -> None:
    """Two long beginnings, first asked for both at once: a worker each. Then either goes home,
    whoever is asked for first, though both are idle."""
    log = tmp_path / "events.jsonl"
    first, second = ([5 + (i * step) % 50 for i in range(600)] for step in (7, 11))
    with serving("--policy", "fcfs", *logged(log, f"preset.place={place}")) as live:
        async with AsyncClient(live.grpc) as client:

            async def ask(prompt: list[int], end: int) -> tuple[int, ...]:
                answer = await client.complete(tokens=[*prompt, end], max_tokens=2, **GREEDY)
                return tuple(answer.choices[0].token_ids)

            begun = await asyncio.gather(ask(first, 9), ask(second, 9))
            await asyncio.sleep(0.3)  # a report is on its way
            again = [await ask(prompt, 9) for prompt in (second, first, first, second)]
            mixed = [await ask(prompt, 10) for prompt in (second, second, first)]
        assert live.stop() == 0
    assert again == [begun[1], begun[0], begun[0], begun[1]]
    assert mixed[0] == mixed[1]
    homes = [home for [home] in places(log).values()]
    one, other = homes[:2]
    assert one != other
    assert homes[2:] == [other, one, one, other, other, other, one]
    entries = list(read(log))
    plans = [a.plan for e in entries for a in e.actions if isinstance(a, SendPlan)]
    assert {plan.prefix_blocks for plan in plans} == {CHAIN}
    told = [
        h for e in entries if isinstance(e.event, Reported) for h in e.event.report.prefixes_added
    ]
    assert len(told) == len(set(told)) == 2 * CHAIN
    assert sum(isinstance(e.event, WorkerAttached) for e in entries) == 2


@pytest.mark.slow
async def test_who_is_moved_is_answered_as_if_it_had_stayed(tmp_path: Path) -> None:
    """Each worker has a place for one. `long` runs on one and `moved` on the other, where it makes
    way for `short`; then the client of `long` leaves, and it goes on there with what it has."""
    log = tmp_path / "events.jsonl"
    settings = (
        "preset.place=max_min", "preset.move_gain=1", "preset.predictor=max",
        "predictor.model=max", "worker.max_running=1",
    )  # fmt: skip
    with serving("--policy", "alise", *logged(log, *settings)) as live:
        async with AsyncClient(live.grpc) as client:

            def begin(text: str, most: int) -> tuple[AsyncStream, AsyncIterator[Chunk]]:
                stream = client.generate(text, max_tokens=most, **GREEDY)
                return stream, aiter(stream)

            async def rest(chunks: AsyncIterator[Chunk]) -> tuple[int, ...]:
                return tuple([token async for chunk in chunks for token in chunk.token_ids])

            alone = await rest(begin("Count from 1 to 150.\n", 400)[1])
            long, began = begin("Count from 3 to 900.\n", 1_500)
            await anext(began)
            _, moved = begin("Count from 1 to 150.\n", 400)
            head = tuple((await anext(moved)).token_ids)
            _, short = begin("Count from 2 to 60.\n", 200)
            await anext(short)
            long.cancel()
            tail, _ = await asyncio.gather(rest(moved), rest(short))
        assert live.stop() == 0
    assert head + tail == alone and len(alone) == 400
    homes = list(places(log).values())
    one, other = homes[1][0], homes[2][0]
    assert homes[1:] == [[one], [other, one], [other]]

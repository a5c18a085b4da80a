"""Placement on the real stack with two workers: requests go to the worker that caches their prefix,
and a moved request gets the same answer. Both workers have the same fixed cost model, so that the
load of the machine does not matter."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from foretoken import AsyncClient
from foretoken.client.answers import Chunk
from foretoken.client.client import AsyncStream
from foretoken.running.embedded import Endpoints, embedded
from foretoken.running.options import ServeOptions
from services.core import FinishReason
from services.costs import CostModel
from services.policies.snapshot import CHAIN
from services.runtime.server import Lifecycle
from services.scheduler.core.events import (
    Cancelled,
    Costed,
    Place,
    Reported,
    SendPlan,
    Step,
    Submitted,
)
from services.scheduler.core.phases import RequestPhase
from services.scheduler.observe.event_log import read
from tests.reach import until
from tests.system.adapters import write_demo_adapter

GREEDY: Any = {"temperature": 0.0, "ignore_eos": True}
LONG, SHORT = 900, 200
ADAPTER = "murmur"
# 1 ms per output token, 0.01 ms per prompt token.
COST = CostModel(base_s=5e-4, prefill_token_s=1e-5, decode_seq_s=5e-4, context_token_s=0.0)


class Prefix(NamedTuple):
    tokens: list[int]
    adapter: str = ""


def tokens(step: int) -> list[int]:
    return [5 + (i * step) % 50 for i in range(600)]


@asynccontextmanager
async def two_equal_workers(policy: str, log: Path, *sets: str) -> AsyncIterator[Endpoints]:
    """A system of two workers with fixed cost models; its control plane runs in this process."""
    fixed = (
        f"scheduler.event_log={log}", "estimator.refit_samples=1000000", "worker.host_gib=0",
        "worker.profile_s=4.5",  # one second is too short for a first fit on a busy machine
        "worker.dtype=float32",  # answers do not depend on the batch
    )  # fmt: skip
    options = ServeOptions(policy=policy, workers=2, http_port=0, grpc_port=0, sets=[*fixed, *sets])
    async with embedded(options, Lifecycle()) as system:
        scheduler = system.control.scheduler
        workers = scheduler.state.workers
        await until(lambda: all(worker.cost.version for worker in workers.values()), 60.0)
        for worker_id in workers:
            scheduler.dispatch(Costed(worker_id, COST))
        yield system


def placed(entries: list[Step]) -> dict[str, list[str]]:
    """The workers of each request, in order; requests in the order of their arrival."""
    homes: dict[str, list[str]] = defaultdict(list)
    for action in (action for entry in entries for action in entry.actions):
        if isinstance(action, Place):
            homes[action.request_id].append(action.worker_id)
    return homes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "second"),
    [("prefix_aware", Prefix(tokens(11))), ("max_min_prefix", Prefix(tokens(7), ADAPTER))],
    ids=["prefix_aware", "max_min_prefix, with an adapter"],
)
async def test_placement_prefers_the_worker_with_the_cached_prefix(
    tmp_path: Path, place: str, second: Prefix
) -> None:
    """Two long prefixes arrive together, so each worker caches one. Later requests go to the worker
    that caches their prefix, though both workers are idle. The second prefix has other tokens, or
    the same ones and an adapter."""
    log, first = tmp_path / "events.jsonl", Prefix(tokens(7))
    adapters = json.dumps({ADAPTER: write_demo_adapter(tmp_path / ADAPTER)})
    sets = f"preset.place={place}", f"worker.lora_modules={adapters}"
    async with two_equal_workers("fcfs", log, *sets) as system:
        state = system.control.scheduler.state
        async with AsyncClient(system.grpc) as client:

            async def ask(prompt: Prefix, end: int) -> tuple[int, ...]:
                answer = await client.complete(
                    tokens=[*prompt.tokens, end], model=prompt.adapter, max_tokens=2, **GREEDY
                )
                return tuple(answer.choices[0].token_ids)

            async def alone(prompt: Prefix, end: int) -> tuple[int, ...]:
                await until(lambda: not state.jobs and known() == [CHAIN, CHAIN])
                return await ask(prompt, end)

            def known() -> list[int]:
                return [len(worker.prefixes.sorted) for worker in state.workers.values()]

            initial = await asyncio.gather(ask(first, 9), ask(second, 9))
            again = [await alone(prompt, 9) for prompt in (second, first, first, second)]
            mixed = [await alone(prompt, 10) for prompt in (second, second, first)]
    assert again == [initial[1], initial[0], initial[0], initial[1]]
    assert mixed[0] == mixed[1]
    entries = list(read(log))
    homes = placed(entries)
    workers_of: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for event in (entry.event for entry in entries):
        if isinstance(event, Submitted):
            workers_of[event.request.prefix_hashes] |= {*homes[event.request.request_id]}
    assert sorted(map(sorted, workers_of.values())) == [["worker-0"], ["worker-1"]]
    assert [len(chain) for chain in workers_of] == [CHAIN, CHAIN]
    plans = [a.plan for e in entries for a in e.actions if isinstance(a, SendPlan)]
    assert {plan.prefix_blocks for plan in plans} == {CHAIN}
    reports = [e.event.report for e in entries if isinstance(e.event, Reported)]
    reported = [name for report in reports for name in report.prefixes_added]
    assert sorted(reported) == sorted(name for chain in workers_of for name in chain)


@pytest.mark.slow
async def test_moved_request_gets_the_same_answer(tmp_path: Path) -> None:
    """Each worker runs one long request. A short request preempts one of them. Then the other
    long request is cancelled, and the preempted one moves to its worker and continues. The
    scheduler hears of the cancel as soon as it has decided the preemption: the short request must
    still run when the slot is free."""
    log = tmp_path / "events.jsonl"
    settings = (
        "preset.place=max_min", "preset.move_gain=1", "preset.predictor=max",
        "worker.max_running=1",
    )  # fmt: skip
    texts = "Count from 1 to 150.\n", "Count from 3 to 170.\n"
    async with two_equal_workers("alise", log, *settings) as system:
        state = system.control.scheduler.state
        async with AsyncClient(system.grpc) as client:

            def begin(text: str, most: int) -> tuple[AsyncStream, AsyncIterator[Chunk]]:
                stream = client.generate(text, max_tokens=most, **GREEDY)
                return stream, aiter(stream)

            async def rest(chunks: AsyncIterator[Chunk]) -> tuple[int, ...]:
                return tuple([token async for chunk in chunks for token in chunk.token_ids])

            def paused() -> list[str]:
                ledger = state.ledger
                waits = [n for n, j in state.jobs.items() if ledger.phase(j) is RequestPhase.QUEUED]
                return [name for name in waits if ledger.held(state.jobs[name])]

            alone = [await rest(begin(text, LONG)[1]) for text in texts]
            await until(lambda: not state.jobs)
            streams, heads = [], []
            for text in texts:
                streams.append(begin(text, LONG))
                heads.append(tuple((await anext(streams[-1][1])).token_ids))
            names = list(state.jobs)
            _, short = begin("Count from 2 to 60.\n", SHORT)
            await until(lambda: bool(paused()), 60.0)
            moved = names.index(paused()[0])
            other = state.jobs[names[1 - moved]]
            cancelled = Cancelled(other.link, names[1 - moved], FinishReason.CANCELLED, 1)
            system.control.scheduler.dispatch(cancelled)
            streams[1 - moved][0].cancel()
            tail, _ = await asyncio.gather(rest(streams[moved][1]), rest(short))
    assert heads[moved] + tail == alone[moved]
    assert len(alone[moved]) == LONG
    homes = placed(list(read(log)))
    [free] = homes[names[1 - moved]]
    first, *later = homes[names[moved]]
    assert first != free
    assert later == [free]

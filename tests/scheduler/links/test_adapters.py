"""LoRA adapters at the scheduler: all workers of a model hold the same ones."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

import pytest
from grpc import StatusCode, aio

from protos.generated import common_pb2, scheduler_pb2
from tests.reach import until
from tests.scheduler.served import Live, Stream, fleets, run_step, running, submitted

Adapter = scheduler_pb2.Adapter
ONE = Adapter(model="demo", name="one", path="/one")


class Holder:
    """A worker that holds what it is asked to, except from folders named /bad."""

    def __init__(self, live: Live, name: str, held: Mapping[str, str] = {}):
        self.held = dict(held)
        adapters = [Adapter(name=each, path=path) for each, path in held.items()]
        self.stream: Stream = live.worker(worker_id=name, address=name, adapters=adapters)
        self.answering = asyncio.ensure_future(self._answer())

    async def _answer(self) -> None:
        answered = 0
        while True:
            await asyncio.sleep(0.001)
            for plan in self.stream.heard[answered:]:
                answered += 1
                if plan.HasField("adapters"):
                    self._hold(plan.adapters)

    def _hold(self, wanted: scheduler_pb2.AdapterSet) -> None:
        bad = [
            each.name
            for each in wanted.adapters
            if each.path == "/bad" and each.name not in self.held
        ]
        self.held = {each.name: each.path for each in wanted.adapters if each.name not in bad}
        states = scheduler_pb2.AdapterStates(
            seq=wanted.seq,
            held=[Adapter(name=name, path=path) for name, path in self.held.items()],
            errors=[scheduler_pb2.AdapterError(name=name, message="no folder") for name in bad],
        )
        self.stream.say(scheduler_pb2.WorkerMessage(adapters=states))

    def leave(self) -> None:
        self.answering.cancel()
        self.stream.leave()


def usable(gateway: Stream) -> list[str]:
    return [each.name for each in fleets(gateway)[-1].adapters]


async def refusal(call: Awaitable[Any]) -> tuple[StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details() or ""


async def test_adapter_is_usable_once_all_workers_hold_it() -> None:
    async with running() as live:
        gateway, workers = live.gateway(), live.service.state.workers
        code, _ = await refusal(live.stub.LoadAdapter(ONE))
        assert code is StatusCode.UNAVAILABLE
        first, second = Holder(live, "a"), Holder(live, "b")
        await until(lambda: workers.keys() == {"a", "b"})
        await live.stub.LoadAdapter(ONE)
        assert first.held == second.held == {"one": "/one"}
        await until(lambda: usable(gateway) == ["one"])
        code, sentence = await refusal(live.stub.LoadAdapter(ONE))
        assert code is StatusCode.INVALID_ARGUMENT and "is loaded from /one" in sentence

        late = Holder(live, "c")
        await until(lambda: "c" in workers)
        assert late.held == {"one": "/one"}, "it holds the adapter before it takes part"
        await live.stub.UnloadAdapter(ONE)
        await until(lambda: not (first.held or second.held or late.held or usable(gateway)))
        code, _ = await refusal(live.stub.UnloadAdapter(ONE))
        assert code is StatusCode.NOT_FOUND
        for worker in (first, second, late):
            worker.leave()


async def test_adapter_that_one_worker_cannot_hold_is_held_by_none() -> None:
    async with running() as live:
        gateway, worker = live.gateway(), Holder(live, "a")
        await until(lambda: "a" in live.service.state.workers)
        call = live.stub.LoadAdapter(Adapter(model="demo", name="x", path="/bad"))
        assert await refusal(call) == (StatusCode.INVALID_ARGUMENT, "path: no folder")
        await live.stub.LoadAdapter(ONE)
        await until(lambda: usable(gateway) == ["one"])
        assert worker.held == {"one": "/one"}
        worker.leave()


async def test_worker_without_an_adapter_of_the_others_is_refused() -> None:
    async with running() as live:
        workers = live.service.state.workers
        first = Holder(live, "a", {"x": "/bad"})
        await until(lambda: "a" in workers)
        second = Holder(live, "b")
        await second.stream.reading
        assert second.stream.ended and second.stream.ended.details() == "no folder"
        assert workers.keys() == {"a"}
        first.leave()
        second.leave()
        await first.stream.reading
        await until(lambda: not workers)
        alone = Holder(live, "b")
        await until(lambda: "b" in workers)
        alone.leave()


async def test_restarted_scheduler_learns_adapters_of_its_workers() -> None:
    async with running() as live:
        gateway, workers = live.gateway(), live.service.state.workers
        first = Holder(live, "a")
        await until(lambda: "a" in workers)
        second = Holder(live, "b", {"one": "/one"})
        await until(lambda: first.held == {"one": "/one"})
        await until(lambda: usable(gateway) == ["one"])
        third = Holder(live, "c", {"two": "/bad"})
        await until(lambda: "c" in workers)
        await asyncio.sleep(0.05)
        assert usable(gateway) == ["one"], "two workers cannot hold the other one"
        for worker in (first, second, third):
            worker.leave()


async def test_unloaded_adapter_stays_so_when_a_worker_comes_back_with_it() -> None:
    async with running() as live:
        gateway, workers = live.gateway(), live.service.state.workers
        stays, leaves = Holder(live, "a", {"one": "/one"}), Holder(live, "b", {"one": "/one"})
        await until(lambda: workers.keys() == {"a", "b"})
        leaves.leave()
        await leaves.stream.reading
        await live.stub.UnloadAdapter(ONE)
        assert not stays.held
        back = Holder(live, "b", {"one": "/one", "two": "/two"})
        await until(lambda: workers.keys() == {"a", "b"})
        await until(lambda: usable(gateway) == ["two"])
        assert stays.held == back.held == {"two": "/two"}
        await live.stub.LoadAdapter(ONE)
        assert stays.held == back.held == {"one": "/one", "two": "/two"}
        for worker in (stays, back):
            worker.leave()


async def test_adapter_stays_usable_while_a_further_worker_loads_it() -> None:
    async with running() as live:
        workers = live.service.state.workers
        holder = Holder(live, "a", {"one": "/one"})
        await until(lambda: "a" in workers)
        loading = live.worker(worker_id="b", address="b")
        await until(lambda: bool(loading.heard))
        fleet = await live.stub.GetFleet(scheduler_pb2.GetFleetRequest())
        assert [each.name for each in fleet.adapters] == ["one"]
        assert workers.keys() == {"a"}
        holder.leave()


async def test_request_waits_for_a_slot_of_its_adapter_and_says_so() -> None:
    """Requests of the adapter in use and without one pass it."""
    async with running() as live:
        live.texts.may.set()
        worker = live.worker(adapter_slots=1, adapter_turn_steps=2**31)
        gateway = live.gateway()
        await until(lambda: any(view.workers for view in fleets(gateway)))

        def submit(name: str, adapter: str) -> None:
            message = submitted(name)
            message.request.adapter = adapter
            gateway.say(message)

        def placed() -> set[str]:
            return {*run_step(gateway, "placed")}

        submit("a", "one")
        await until(lambda: placed() == {"a"})
        for name, adapter in (("b", "two"), ("c", ""), ("d", "one")):
            submit(name, adapter)
        await until(lambda: placed() == {"a", "c", "d"})
        story = await live.stub.Why(scheduler_pb2.WhyRequest(request_id="b"))
        assert "waits: its adapter has no slot: adapters in use 1, " in str(story)
        ended = [
            scheduler_pb2.FinishedRequest(
                request_id=name, output_tokens=1, reason=common_pb2.FINISH_REASON_STOP
            )
            for name in "ad"
        ]
        report = scheduler_pb2.Report(
            seq=1, applied_plan_seq=worker.heard[-1].seq, finished=ended, free_blocks=900
        )
        worker.say(scheduler_pb2.WorkerMessage(report=report))
        await until(lambda: "b" in placed())

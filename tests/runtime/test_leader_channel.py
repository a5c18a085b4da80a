"""A channel to the leader among several schedulers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from grpc import StatusCode, aio

from protos.generated import scheduler_pb2, scheduler_pb2_grpc
from services.runtime.config import ConfigError, load
from services.runtime.network.connector import PLAIN
from services.runtime.server import Mount, Server, listening
from services.worker.config import WorkerConfig


class Numbered(scheduler_pb2_grpc.SchedulerServicer):
    """Answers with its number."""

    def __init__(self, number: int):
        self._view = scheduler_pb2.FleetView(queued=number)

    async def GetFleet(self, request: Any, context: Any) -> scheduler_pb2.FleetView:
        return self._view

    async def Why(self, request: Any, context: Any) -> scheduler_pb2.WhyResponse:
        raise NotImplementedError

    async def LoadAdapter(
        self, request: scheduler_pb2.Adapter, context: Any
    ) -> scheduler_pb2.AdapterResponse:
        raise NotImplementedError

    async def UnloadAdapter(
        self, request: scheduler_pb2.Adapter, context: Any
    ) -> scheduler_pb2.AdapterResponse:
        raise NotImplementedError

    def Attach(self, requests: Any, context: Any) -> AsyncIterator[scheduler_pb2.Plan]:
        raise NotImplementedError

    async def Submit(
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[scheduler_pb2.SchedulerEvent]:
        async for _ in requests:
            yield scheduler_pb2.SchedulerEvent(fleet=self._view)


async def start(stack: AsyncExitStack, number: int) -> Server:
    add = scheduler_pb2_grpc.add_SchedulerServicer_to_server
    mount = Mount("foretoken.v1.Scheduler", add, Numbered(number))
    return await stack.enter_async_context(listening([mount], "127.0.0.1:0", serving=False))


async def hellos() -> AsyncIterator[scheduler_pb2.SubmitMessage]:
    yield scheduler_pb2.SubmitMessage()
    await asyncio.Event().wait()


async def test_stream_waits_for_the_leader_and_calls_reach_it():
    async with AsyncExitStack() as stack:
        servers = [await start(stack, number) for number in range(3)]
        channel = PLAIN.connect_to_leader(",".join(f"127.0.0.1:{each.port}" for each in servers))
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        with pytest.raises(aio.AioRpcError) as refused:
            await stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=10)
        assert refused.value.code() is StatusCode.UNAVAILABLE
        for leader in (1, 2):
            call = stub.Submit(hellos())
            first = asyncio.ensure_future(anext(aiter(call)))
            done, _ = await asyncio.wait({first}, timeout=0.1)
            assert not done
            servers[leader].set_serving(True)
            assert (await first).fleet.queued == leader
            answer = await stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=10)
            assert answer.queued == leader
            servers[leader].set_serving(False)
            call.cancel()
            with pytest.raises(aio.AioRpcError):  # the news of NOT_SERVING takes a moment
                while True:
                    await stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=10)
        await channel.close()


async def test_single_address_is_reached_whatever_its_health():
    async with AsyncExitStack() as stack:
        server = await start(stack, 7)
        channel = PLAIN.connect_to_leader(f"127.0.0.1:{server.port}")
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        answer = await stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=10)
        assert answer.queued == 7
        await channel.close()


@pytest.mark.parametrize("address", ["a:1", "unix:/x", "1.2.3.4:1, 1.2.3.5:1", "dns:///s:1"])
def test_addresses_of_schedulers(address: str):
    assert load(WorkerConfig, {"scheduler_address": address}).scheduler_address == address


@pytest.mark.parametrize(
    "address", ["a:1,b:1", "1.2.3.4:1,", "1.2.3.4:1,[::1]:1", "unix:/x,unix:/y"]
)
def test_wrong_list_of_schedulers_is_a_sentence(address: str):
    with pytest.raises(ConfigError, match=r"worker\.scheduler_address: several addresses must be"):
        load(WorkerConfig, {"scheduler_address": address})

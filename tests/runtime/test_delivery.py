"""Following a stream: its call ends with its follower, whenever that is cancelled."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protos.generated import estimator_pb2, estimator_pb2_grpc
from services.runtime.network.delivery import follow
from services.runtime.network.streams import ResponseStream
from tests.reach import WAYS, reaching, until

REQUEST = estimator_pb2.GetCostModelRequest(worker_id="w")


class Watched(estimator_pb2_grpc.EstimatorServicer):
    """Counts open streams; each sends one model and stays open."""

    def __init__(self) -> None:
        self.open = 0

    async def WatchCostModel(
        self, request: Any, context: Any
    ) -> AsyncIterator[estimator_pb2.CostModel]:
        self.open += 1
        try:
            yield estimator_pb2.CostModel(version=1)
            await asyncio.sleep(600)
        finally:
            self.open -= 1

    async def GetCostModel(self, request: Any, context: Any) -> estimator_pb2.CostModel:
        raise NotImplementedError

    async def Observe(self, request: Any, context: Any) -> estimator_pb2.ObserveTimingsResponse:
        raise NotImplementedError


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [True, False], ids=["after-a-message", "as-it-opens"])
async def test_cancelled_follower_cancels_its_call(way: str, first: bool) -> None:
    servicer = Watched()
    received: list[int] = []
    add = estimator_pb2_grpc.add_EstimatorServicer_to_server
    async with reaching(way, "foretoken.v1.Estimator", add, servicer) as channel:
        stub = estimator_pb2_grpc.EstimatorStub(channel)

        async def open_stream() -> ResponseStream[estimator_pb2.CostModel]:
            return stub.WatchCostModel(REQUEST)

        following = follow(open_stream, lambda model: received.append(model.version), "models")
        follower = asyncio.create_task(following)
        await until(lambda: bool(received) if first else servicer.open == 1)
        follower.cancel()
        with pytest.raises(asyncio.CancelledError):
            await follower
        await until(lambda: not servicer.open)

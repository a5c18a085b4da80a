"""Calls behave the same over a socket and in process."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from math import inf
from typing import Any

import grpc
import pytest
from grpc import aio

from protos.generated import estimator_pb2, estimator_pb2_grpc
from services.runtime.errors import InvalidArgument, ServiceError
from tests.reach import WAYS, reaching, until

NAME = "foretoken.v1.Estimator"
ADD = estimator_pb2_grpc.add_EstimatorServicer_to_server
ASK = estimator_pb2.GetCostModelRequest(worker_id="w")
INTERNAL = "internal error; see the server's log for details"

both_ways = pytest.mark.parametrize("way", WAYS)


class Scripted(estimator_pb2_grpc.EstimatorServicer):
    """Runs a script in each call. `open` counts the streams that are not cleaned up."""

    def __init__(self, script: Callable[[Any], Awaitable[None]]):
        self._script = script
        self.open = 0
        self.sent = 0

    async def GetCostModel(self, request: Any, context: Any) -> estimator_pb2.CostModel:
        await self._script(context)
        return estimator_pb2.CostModel(worker_id=request.worker_id)

    async def WatchCostModel(
        self, request: Any, context: Any
    ) -> AsyncIterator[estimator_pb2.CostModel]:
        self.open += 1
        try:
            for version in range(3):
                self.sent += 1
                yield estimator_pb2.CostModel(version=version)
            await self._script(context)
        finally:
            self.open -= 1

    async def Observe(self, request: Any, context: Any) -> estimator_pb2.ObserveTimingsResponse:
        return estimator_pb2.ObserveTimingsResponse()


def raising(error: Exception) -> Callable[[Any], Awaitable[None]]:
    async def script(_: Any) -> None:
        raise error

    return script


async def endless(_: Any) -> None:
    await asyncio.sleep(600)


async def aborting(context: Any) -> None:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not today", (("hint", "tomorrow"),))


async def downstream(_: Any) -> None:
    """Raises the error of a call to another service."""
    raise aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND, aio.Metadata(), aio.Metadata(), "a secret of another service"
    )


BUSY = ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", retry_after_s=1.5)
IDLE = ServiceError(grpc.StatusCode.UNAVAILABLE, "no worker is attached", retry_after_s=inf)
STATUSES = [
    (raising(InvalidArgument("n", "must be 1")), "INVALID_ARGUMENT", "n: must be 1"),
    (raising(BUSY), "RESOURCE_EXHAUSTED", "the queue is full"),
    (raising(ExceptionGroup("g", [BUSY])), "RESOURCE_EXHAUSTED", "the queue is full"),
    (raising(RuntimeError("/etc/secret")), "INTERNAL", INTERNAL),
    (raising(TimeoutError("secret")), "INTERNAL", INTERNAL),
    (downstream, "INTERNAL", INTERNAL),
    (aborting, "FAILED_PRECONDITION", "not today"),
]


@both_ways
@pytest.mark.parametrize(("script", "code", "sentence"), STATUSES)
async def test_exception_becomes_a_status_without_details(
    way: str, script: Callable[[Any], Awaitable[None]], code: str, sentence: str
) -> None:
    async with reaching(way, NAME, ADD, Scripted(script)) as channel:
        stub = estimator_pb2_grpc.EstimatorStub(channel)
        with pytest.raises(aio.AioRpcError) as unary:
            await stub.GetCostModel(ASK)
        seen = []
        with pytest.raises(aio.AioRpcError) as stream:
            async for model in stub.WatchCostModel(ASK):
                seen += [model.version]
    assert seen == [0, 1, 2]
    for caught in (unary.value, stream.value):
        assert (caught.code().name, caught.details()) == (code, sentence)
        assert "secret" not in str(caught)


@both_ways
@pytest.mark.parametrize(
    ("error", "exact", "rounded"), [(BUSY, "1.5", "2"), (IDLE, "86400", "86400")]
)
async def test_retry_time_is_in_trailers(
    way: str, error: ServiceError, exact: str, rounded: str
) -> None:
    async with reaching(way, NAME, ADD, Scripted(raising(error))) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await estimator_pb2_grpc.EstimatorStub(channel).GetCostModel(ASK)
    expected = {"retry-after-s": exact, "retry-after": rounded}
    assert dict(caught.value.trailing_metadata()) == expected


@both_ways
async def test_unexpected_errors_are_logged_once(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        async with reaching(way, NAME, ADD, Scripted(raising(RuntimeError("why")))) as channel:
            with pytest.raises(aio.AioRpcError):
                await estimator_pb2_grpc.EstimatorStub(channel).GetCostModel(ASK)
    logged = [r for r in caplog.records if r.name == "services.runtime.errors"]
    assert len(logged) == 1
    assert logged[0].exc_info is not None
    assert str(logged[0].exc_info[1]) == "why"


@both_ways
async def test_deadline_ends_the_call_on_both_sides(way: str) -> None:
    servicer = Scripted(endless)
    async with reaching(way, NAME, ADD, servicer) as channel:
        stub = estimator_pb2_grpc.EstimatorStub(channel)
        with pytest.raises(aio.AioRpcError) as unary:
            await stub.GetCostModel(ASK, timeout=0.05)
        with pytest.raises(aio.AioRpcError) as stream:
            async for _ in stub.WatchCostModel(ASK, timeout=0.05):
                pass
        assert unary.value.code() == stream.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not servicer.open)


@both_ways
async def test_cancelled_stream_is_cleaned_up(way: str) -> None:
    servicer = Scripted(endless)
    async with reaching(way, NAME, ADD, servicer) as channel:
        call = estimator_pb2_grpc.EstimatorStub(channel).WatchCostModel(ASK)
        asyncio.get_running_loop().call_later(0.05, call.cancel)
        with pytest.raises(asyncio.CancelledError):
            async for _ in call:
                pass
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await until(lambda: not servicer.open)


@both_ways
async def test_cancel_after_the_loop_has_no_effect(way: str) -> None:
    servicer = Scripted(endless)
    async with reaching(way, NAME, ADD, servicer) as channel:
        call = estimator_pb2_grpc.EstimatorStub(channel).WatchCostModel(ASK)
        async for model in call:
            assert model.version == 0
            break
        call.cancel()
        await until(lambda: not servicer.open)


@both_ways
async def test_cancelled_reader_cancels_its_call(way: str) -> None:
    servicer = Scripted(endless)
    async with reaching(way, NAME, ADD, servicer) as channel:
        stub = estimator_pb2_grpc.EstimatorStub(channel)

        async def read() -> None:
            call = stub.WatchCostModel(ASK)
            try:
                async for _ in call:
                    pass
            finally:
                call.cancel()  # gRPC does not if the reader has not read yet

        reader = asyncio.create_task(read())
        await until(lambda: servicer.open == 1)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await until(lambda: not servicer.open)


async def test_unreferenced_in_process_call_is_closed() -> None:
    """Over a socket the call would end with its channel."""
    servicer = Scripted(endless)
    async with reaching("in-process", NAME, ADD, servicer) as channel:
        call = estimator_pb2_grpc.EstimatorStub(channel).WatchCostModel(ASK)
        assert (await anext(aiter(call))).version == 0
        assert servicer.open == 1
        del call
        await until(lambda: not servicer.open)

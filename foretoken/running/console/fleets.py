"""Reads the fleets of one or several schedulers as one."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from grpc import aio

from protos.generated import scheduler_pb2, scheduler_pb2_grpc

TIMEOUT_S = 2.0  # of a call to a service

AskFleet = Callable[[], Awaitable[scheduler_pb2.FleetView]]


def fleet_over(schedulers: Sequence[aio.Channel]) -> AskFleet:
    """Returns a function that reads the fleets. It leaves out the schedulers that do not answer,
    and raises AioRpcError if none does."""
    stubs = [scheduler_pb2_grpc.SchedulerStub(channel) for channel in schedulers]

    async def ask(
        stub: "scheduler_pb2_grpc.SchedulerAsyncStub",
    ) -> scheduler_pb2.FleetView | aio.AioRpcError:
        try:
            return await stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=TIMEOUT_S)
        except aio.AioRpcError as error:
            return error

    async def ask_all() -> scheduler_pb2.FleetView:
        answers = await asyncio.gather(*map(ask, stubs))
        views = [answer for answer in answers if isinstance(answer, scheduler_pb2.FleetView)]
        errors = [answer for answer in answers if isinstance(answer, aio.AioRpcError)]
        if not views:
            raise errors[0]
        return merge_fleets(views)

    return ask_all


def merge_fleets(views: Sequence[scheduler_pb2.FleetView]) -> scheduler_pb2.FleetView:
    """All workers and waiting requests; the time until the last queue is empty."""
    return scheduler_pb2.FleetView(
        workers=[worker for view in views for worker in view.workers],
        queued=sum(view.queued for view in views),
        policy=views[0].policy,
        drain_s=max(view.drain_s for view in views),
    )

"""What a scheduler does and refuses as a standby, as the leader, and once deposed."""

import time
from math import inf

import grpc
import pytest
from grpc import aio

from protos.generated import scheduler_pb2
from services.scheduler.leadership.keeper import SoleLeadership
from tests.reach import until
from tests.scheduler.served import Live, fleets, running, submitted


class Given(SoleLeadership):
    """Leads before the time that a test sets; another scheduler may lead otherwise."""

    def __init__(self, until_s: float, leader: str = ""):
        self.until_s, self.leader, self.changes = until_s, leader, 1 if leader else 0

    @property
    def leads(self) -> bool:  # type: ignore[override] # the base class always leads
        return time.monotonic() < self.until_s


async def refusal(live: Live) -> str:
    with pytest.raises(aio.AioRpcError) as refused:
        await live.stub.GetFleet(scheduler_pb2.GetFleetRequest())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(refused.value.details())


async def test_standby_refuses_streams_and_names_the_leader() -> None:
    leadership = Given(-inf)
    async with running(leadership=leadership) as live:
        streams = [live.gateway(), live.worker()]
        await until(lambda: all(each.ended is not None for each in streams))
        for each in streams:
            assert each.ended is not None
            assert each.ended.code() is grpc.StatusCode.UNAVAILABLE
        assert "this scheduler is a standby, none leads" in await refusal(live)
        leadership.leader = "10.0.0.1:50052"
        assert "the scheduler at 10.0.0.1:50052 leads" in await refusal(live)
        assert live.value("scheduler_leads") == 0
        leadership.until_s = inf
        worker = live.worker()
        await until(lambda: "w" in live.service.state.workers)
        assert worker.ended is None
        assert live.value("scheduler_leads") == 1


async def test_scheduler_past_its_lease_decides_nothing() -> None:
    """Its streams are still open, as after a pause of the process."""
    leadership = Given(inf)
    async with running(leadership=leadership) as live:
        gateway, worker = live.gateway(), live.worker()
        await until(lambda: bool(worker.heard) and bool(fleets(gateway)))
        leadership.until_s = time.monotonic()
        plans, steps = len(worker.heard), live.service.state.last_step
        gateway.say(submitted("late"))
        probe = live.gateway()
        await until(lambda: probe.ended is not None)
        assert live.service.state.jobs == {}
        assert live.service.state.last_step is steps
        assert len(worker.heard) == plans

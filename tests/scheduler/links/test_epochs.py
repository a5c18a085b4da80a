"""Processes of one worker id, one after the other, at a served scheduler."""

from grpc import StatusCode

from protos.generated import scheduler_pb2
from tests.reach import until
from tests.scheduler.served import Live, fleets, running


async def attached(live: Live, epoch: int) -> None:
    workers = live.service.state.workers
    await until(lambda: "w" in workers and workers["w"].view.epoch == epoch)


async def test_earlier_process_is_refused_while_a_later_one_is_attached() -> None:
    async with running() as live:
        earlier = live.worker(epoch=1)
        await attached(live, 1)
        later = live.worker(epoch=2)
        await earlier.reading
        assert earlier.ended and earlier.ended.code() is StatusCode.ALREADY_EXISTS
        returning = live.worker(epoch=1)
        await returning.reading
        assert returning.ended and returning.ended.code() is StatusCode.ALREADY_EXISTS
        assert returning.ended.details() == "a later process attached as worker w"
        # Its hello has no effect.
        assert live.service.state.workers["w"].view.epoch == 2
        assert later.ended is None
        later.leave()
        await later.reading


async def test_same_process_attaches_again() -> None:
    async with running() as live:
        first = live.worker(epoch=7)
        await attached(live, 7)
        again = live.worker(epoch=7)
        await first.reading
        again.say(scheduler_pb2.WorkerMessage(report=scheduler_pb2.Report(seq=1)))
        await attached(live, 7)
        assert again.ended is None


async def test_earlier_process_serves_once_the_later_one_has_left() -> None:
    async with running() as live:
        later = live.worker(epoch=2)
        await attached(live, 2)
        later.leave()
        await later.reading
        await until(lambda: "w" not in live.service.state.workers)
        live.worker(epoch=1)
        await attached(live, 1)


async def test_gateways_receive_the_epoch() -> None:
    async with running() as live:
        live.worker(epoch=2**63)
        await attached(live, 2**63)
        gateway = live.gateway()
        await until(lambda: bool(fleets(gateway)))
        [worker] = fleets(gateway)[-1].workers
        assert worker.epoch == 2**63

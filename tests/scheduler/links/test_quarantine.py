"""A served scheduler after errors in steps of its state."""

from math import inf
from typing import Any

import pytest
from grpc import StatusCode

from protos.generated import scheduler_pb2
from services.runtime.errors import UnrecoverableError
from services.scheduler.core import events as ev
from tests.reach import until
from tests.scheduler.served import running, submitted

BROKEN: Any = None


async def test_failing_message_ends_its_stream_and_others_are_served() -> None:
    async with running() as live:
        first, second = live.worker("a"), live.worker("b")
        workers = live.service.state.workers
        await until(lambda: {"a", "b"} == set(workers))
        # A round in between would meet the defect first, which ends the scheduler.
        await until(lambda: live.service.state.round_due_s == inf)
        workers["a"].prefixes = BROKEN  # a defect, which its next report meets
        first.say(scheduler_pb2.WorkerMessage(report=scheduler_pb2.Report(seq=1)))
        await first.reading
        assert first.ended and first.ended.code() is StatusCode.INTERNAL
        assert "Reported" in (first.ended.details() or "")
        assert live.value("scheduler_quarantined_events_total", kind="Reported") == 1
        await until(lambda: {"b"} == set(workers))
        gateway = live.gateway()
        gateway.say(submitted("r"))
        await until(lambda: "r" in live.service.state.jobs)
        assert second.ended is None


async def test_failing_round_ends_the_scheduler() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        async with running() as live:
            stream = live.worker("a")
            workers = live.service.state.workers
            await until(lambda: "a" in workers)
            workers["a"].view = BROKEN
            with pytest.raises(AttributeError):
                live.service.dispatch(ev.Round())
            await stream.reading
    assert raised.value.subgroup(UnrecoverableError)


async def test_displaced_worker_is_counted_and_its_stream_says_why() -> None:
    async with running() as live:
        first = live.worker("a")
        await until(lambda: "a" in live.service.state.workers)
        live.worker("a")
        await first.reading
        assert first.ended and first.ended.code() is StatusCode.ALREADY_EXISTS
        assert live.value("workers_displaced_total") == 1

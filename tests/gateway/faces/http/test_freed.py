"""Memory of ended requests is freed at once."""

import gc
from collections.abc import AsyncIterator

import pytest

from gateway.sessions.call import ClientCall, LiveChoice
from protos.generated import scheduler_pb2 as sched
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: tokens_of("123")) as running:
        yield running


REFUSED = sched.Rejected(reason=sched.REJECT_REASON_QUEUE_FULL, message="full")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [200, 429])
async def test_ended_requests_are_freed_without_the_garbage_collector(
    harness: Harness, stream: bool, status: int
) -> None:
    """Cycles among the objects of a request would be freed by full collections, which stop all
    streams."""
    if status == 429:
        harness.scheduler.answers = lambda _: sched.RequestEvent(rejected=REFUSED)
    body = {"model": "demo", "prompt": "a", "max_tokens": 4, "stream": stream}
    await harness.http("POST", "/v1/completions", body)  # what is made once
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            assert (await harness.http("POST", "/v1/completions", body)).status == status
        await harness.until(lambda: not harness.gateway.live)
        await harness.until(lambda: _count(ClientCall) == 0)
        assert _count(LiveChoice) == 0
    finally:
        gc.enable()


def _count(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())

"""Messages with any value in any field, of a worker and of a scheduler: the gateway serves on."""

import asyncio
import logging
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from foretoken import AsyncClient
from protos.generated import common_pb2, scheduler_pb2, worker_pb2
from tests.border.hostile import hostile
from tests.examples import examples
from tests.gateway.gateway_fakes import Harness, run_harness
from tests.gateway.gateway_fixtures import IDS, WORDS, first_prompt

NAME = "x"  # stands for the id of the request
SCORE = common_pb2.TokenLogprob(token_id=5, logprob=-1, top_ids=[5], top_logprobs=[-1])
TOKENS = worker_pb2.RequestTokens(
    request_id=NAME, token_ids=IDS[:2], logprobs=[SCORE, SCORE], prompt_logprobs=[SCORE]
)
FORECAST = scheduler_pb2.ForecastUpdate(
    forecast=common_pb2.Forecast(points=[5], weights=[1]), token_s=0.1, ttft_s=0.2
)
WORKER = scheduler_pb2.WorkerInfo(
    worker_id="w", address="unix:/none", model="demo", kv_tokens=512, max_context_tokens=512
)
EVENTS = [
    scheduler_pb2.RequestEvent(request_id=NAME, forecast_update=FORECAST),
    scheduler_pb2.RequestEvent(
        request_id=NAME, length_bound=scheduler_pb2.LengthBound(output_tokens=5)
    ),
    scheduler_pb2.RequestEvent(request_id=NAME, preempted=scheduler_pb2.Preempted()),
    scheduler_pb2.RequestEvent(request_id=NAME, resumed=scheduler_pb2.Resumed()),
    scheduler_pb2.RequestEvent(
        request_id=NAME, finished=scheduler_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP)
    ),
    scheduler_pb2.RequestEvent(
        request_id=NAME,
        rejected=scheduler_pb2.Rejected(reason=scheduler_pb2.REJECT_REASON_QUEUE_FULL),
    ),
]
batches = hostile(worker_pb2.TokenBatch(requests=[TOKENS]))
events = hostile(
    scheduler_pb2.SchedulerEvent(fleet=scheduler_pb2.FleetView(workers=[WORKER])),
    *(scheduler_pb2.SchedulerEvent(request=each) for each in EVENTS),
)
Said = Sequence[worker_pb2.TokenBatch | scheduler_pb2.SchedulerEvent]


def say(harness: Harness, message: worker_pb2.TokenBatch | scheduler_pb2.SchedulerEvent) -> None:
    request_id = harness.worker.prompts[0].request_id
    if isinstance(message, scheduler_pb2.SchedulerEvent):
        if message.request.request_id == NAME:
            message.request.request_id = request_id
        harness.scheduler.streams[-1].put_nowait(message)
        return
    for tokens in message.requests:
        tokens.request_id = request_id if tokens.request_id == NAME else tokens.request_id
    harness.worker.streams[-1].put_nowait(message)


async def attack(said: Said) -> None:
    async with run_harness() as harness, AsyncClient(harness.grpc_address) as client:
        asked = asyncio.ensure_future(client.complete("1,", include_forecast=True))
        await first_prompt(harness)
        for message in said:
            say(harness, message)
        await asyncio.sleep(0.02)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        greeted = len(harness.scheduler.hellos)
        harness.scheduler.break_stream()  # the next one brings the true fleet
        await harness.until(lambda: len(harness.scheduler.hellos) > greeted)
        harness.worker.script = lambda _: IDS
        await harness.until(lambda: harness.front.ready)
        assert (await client.complete("1,")).text == WORDS


@pytest.mark.slow
@settings(
    max_examples=examples(45),
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(said=st.lists(batches | events, min_size=1, max_size=4))
def test_any_answer_is_survived(caplog: pytest.LogCaptureFixture, said: Said) -> None:
    caplog.clear()
    asyncio.run(attack(said))
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]

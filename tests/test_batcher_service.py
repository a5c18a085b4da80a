"""The batcher through its contract, over a socket and in process."""

import grpc
import pytest
from grpc import aio
from prometheus_client import CollectorRegistry

from protos import batcher_pb2, batcher_pb2_grpc, common_pb2
from services.batcher.config import BatcherConfig
from services.batcher.service import BatcherService
from tests.reach import WAYS, reaching

NAME = "foretoken.v1.Batcher"
ADD = batcher_pb2_grpc.add_BatcherServicer_to_server


def service(registry: CollectorRegistry | None = None, rows_max: int = 1_000) -> BatcherService:
    return BatcherService(BatcherConfig(rows_max=rows_max), registry or CollectorRegistry())


def rows(count: int, prompt: int, longest: int) -> batcher_pb2.Candidates:
    return batcher_pb2.Candidates(
        prompt_tokens=[prompt] * count,
        output_tokens=[0] * count,
        max_tokens=[longest] * count,
        forecast=[0] * count,
    )


def group(worker_id: str, running: int, queued: int, kv_tokens: int = 1_000) -> batcher_pb2.Group:
    return batcher_pb2.Group(
        worker_id=worker_id,
        kv_tokens=kv_tokens,
        max_running=64,
        running=rows(running, 20, 80),
        queued=rows(queued, 20, 80),
    )


def question(policy: str, **params: float) -> batcher_pb2.FormRequest:
    return batcher_pb2.FormRequest(
        round=7,
        policy=policy,
        params=params,
        forecasts=[common_pb2.Forecast(points=[20, 80], weights=[0.5, 0.5])],
        groups=[group("w0", 5, 20), group("w1", 0, 2), group("w2", 0, 0)],
    )


@pytest.mark.parametrize("way", WAYS)
async def test_each_group_gets_its_batch(way: str) -> None:
    async with reaching(way, NAME, ADD, service()) as channel:
        stub = batcher_pb2_grpc.BatcherStub(channel)
        answer = await stub.Form(question("conservative", overcommit=1.0))
        assert list(answer.batches) == [
            batcher_pb2.Batch(
                worker_id="w0",
                admit=5,
                peak_tokens=1_000,
                wait_reason="the next one would need 1100 tokens of KV cache in all, "
                "1000 of 1000 may be planned",
            ),
            batcher_pb2.Batch(worker_id="w1", admit=2, peak_tokens=200),
            batcher_pb2.Batch(worker_id="w2", admit=0, peak_tokens=0),
        ]
        aggressive = await stub.Form(question("aggressive"))
        assert [b.admit for b in aggressive.batches] == [20, 2, 0]


async def test_both_ways_give_the_same_answer_each_time() -> None:
    """Randomness comes from the round and the group's place, from nothing else."""
    answers = []
    for way in (*WAYS, *WAYS):
        async with reaching(way, NAME, ADD, service()) as channel:
            answers.append(
                await batcher_pb2_grpc.BatcherStub(channel).Form(question("past_future"))
            )
    assert all(answer == answers[0] for answer in answers)
    assert 5 < answers[0].batches[0].admit < 20


def spoilt(**change: object) -> batcher_pb2.FormRequest:
    request = question("past_future")
    for name, value in change.items():
        queued = request.groups[0].queued
        del getattr(queued, name)[:]
        getattr(queued, name).extend(value)
    return request


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (question("fifo"), "policy: no policy is called 'fifo'; known: aggressive, conserv"),
        (question("past_future", watermark=1), "no parameter 'watermark'; known: reserved"),
        (question("aggressive", watermark=float("nan")), "aggressive.watermark must lie in"),
        (spoilt(output_tokens=[1]), "groups[0].queued.output_tokens: must have 20 rows, got 1"),
        (spoilt(forecast=[1] * 20), "groups[0].queued.forecast: must be at most 0, got 1"),
        (spoilt(max_tokens=[2**25] * 20), "groups[0].queued.max_tokens: must be at most"),
        (
            batcher_pb2.FormRequest(
                policy="aggressive", forecasts=[common_pb2.Forecast(points=[3, 2])]
            ),
            "forecasts[0]: forecast points must ascend",
        ),
        (
            batcher_pb2.FormRequest(
                policy="aggressive", forecasts=[common_pb2.Forecast(points=[2.0**30])]
            ),
            "forecasts[0]: a forecast is of at most",
        ),
        (
            batcher_pb2.FormRequest(policy="aggressive", forecasts=[common_pb2.Forecast()]),
            "forecasts[0]: a forecast has 1 to 64 points",
        ),
        (
            batcher_pb2.FormRequest(policy="aggressive", groups=[group("w", 30, 40)] * 2),
            "groups: at most 100 a call, got 140",
        ),
    ],
)
@pytest.mark.parametrize("way", WAYS)
async def test_bad_questions_are_refused_by_field(
    way: str, request_: batcher_pb2.FormRequest, sentence: str
) -> None:
    async with reaching(way, NAME, ADD, service(rows_max=100)) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await batcher_pb2_grpc.BatcherStub(channel).Form(request_)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in (caught.value.details() or "")


async def test_rounds_are_counted() -> None:
    registry = CollectorRegistry()
    async with reaching("in-process", NAME, ADD, service(registry)) as channel:
        await batcher_pb2_grpc.BatcherStub(channel).Form(question("conservative"))
    labels = {"policy": "conservative"}
    assert registry.get_sample_value("foretoken_batcher_rounds_total", labels) == 1
    assert registry.get_sample_value("foretoken_batcher_admitted_total", labels) == 7
    assert registry.get_sample_value("foretoken_batcher_policy_seconds_count", labels) == 1

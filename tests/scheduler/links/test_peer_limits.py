"""Bounds on the streams of peers, and the count of invalid messages."""

import pytest
from grpc import StatusCode

from protos.generated import common_pb2, scheduler_pb2
from tests.reach import until
from tests.scheduler.served import Stream, running


async def ending(stream: Stream) -> tuple[StatusCode, str]:
    """The status with which a stream is refused."""
    await stream.reading
    assert stream.ended is not None
    return stream.ended.code(), stream.ended.details() or ""


async def test_further_worker_is_refused_until_another_leaves() -> None:
    async with running(max_workers=1) as live:
        first = live.worker("a")
        await until(lambda: "a" in live.service.state.workers)
        code, sentence = await ending(live.worker("b"))
        assert code is StatusCode.RESOURCE_EXHAUSTED and "scheduler.max_workers" in sentence
        first.leave()
        await first.reading
        live.worker("b")
        await until(lambda: "b" in live.service.state.workers)


async def test_stream_without_hello_is_ended() -> None:
    async with running(hello_wait_s=0.05) as live:
        mute = Stream(live.stub.Attach)
        code, sentence = await ending(mute)
        assert (code, sentence) == (
            StatusCode.DEADLINE_EXCEEDED, "no hello came within 0.05 s"
        )  # fmt: skip
        mute.leave()


async def test_invalid_messages_are_counted_by_method_and_field() -> None:
    async with running() as live:
        counted = "scheduler_invalid_messages_total"
        code, sentence = await ending(live.worker(block_tokens=0))
        assert code is StatusCode.INVALID_ARGUMENT and sentence.startswith("block_tokens: must be")
        assert live.value(counted, method="Attach", field="block_tokens") == 1
        worker = live.worker()
        await until(lambda: "w" in live.service.state.workers)
        report = scheduler_pb2.Report(seq=1, free_blocks=2**30)
        worker.say(scheduler_pb2.WorkerMessage(report=report))
        assert (await ending(worker))[0] is StatusCode.INVALID_ARGUMENT
        assert live.value(counted, method="Attach", field="free_blocks") == 1
        stranger = Stream(live.stub.Submit)
        stranger.say(scheduler_pb2.SubmitMessage())
        assert (await ending(stranger))[0] is StatusCode.INVALID_ARGUMENT
        assert live.value(counted, method="Submit", field="hello") == 1
        stranger.leave()


async def test_worker_that_repeats_a_report_or_goes_back_ends_its_stream() -> None:
    async with running() as live:
        for numbers in ([0], [1, 1], [2, 1]):
            worker = live.worker()
            for seq in numbers:
                worker.say(scheduler_pb2.WorkerMessage(report=scheduler_pb2.Report(seq=seq)))
            code, sentence = await ending(worker)
            assert code is StatusCode.INVALID_ARGUMENT and sentence.startswith(
                "report.seq: must be"
            )
        counted = "scheduler_invalid_messages_total"
        assert live.value(counted, method="Attach", field="report.seq") == 3


@pytest.mark.parametrize("elapsed_s", [-1.0, 86_401.0, float("nan")])
async def test_impossible_time_ends_the_stream_of_a_worker(elapsed_s: float) -> None:
    timing = common_pb2.StepTiming(decode_seqs=1, elapsed_s=elapsed_s)
    swap = common_pb2.SwapTiming(tokens=1, elapsed_s=elapsed_s)
    async with running() as live:
        for report, field in (
            (scheduler_pb2.Report(seq=1, timings=[timing]), "timings"),
            (scheduler_pb2.Report(seq=1, swaps=[swap]), "swaps"),
        ):
            worker = live.worker()
            worker.say(scheduler_pb2.WorkerMessage(report=report))
            assert (await ending(worker))[1].startswith(
                f"{field}.elapsed_s: must be from 0 to 86400"
            )
        code, sentence = await ending(live.worker(profile=[timing]))
        assert code is StatusCode.INVALID_ARGUMENT and sentence.startswith("profile.elapsed_s")

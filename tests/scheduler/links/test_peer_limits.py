"""Bounds on the streams of peers, and the count of invalid messages."""

from grpc import StatusCode

from protos.generated import scheduler_pb2
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

"""Messages with any value in any field: the peer gets a status, and the scheduler serves on."""

import asyncio
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.generated import scheduler_pb2
from tests.reach import until
from tests.scheduler.served import Live, Stream, run_step, running, submitted

INTEGERS = st.sampled_from([0, 1, 2, 15, 16, 17, 1_000, 2**31 - 1])
WIDE = INTEGERS | st.sampled_from([2**32 - 1, 2**40])
SIGNED = INTEGERS | st.sampled_from([-1, -(2**31)])
FLOATS = st.sampled_from([0.0, -1.0, 0.5, 1e-300, 1e300, float("nan"), float("inf")])
TEXTS = st.sampled_from(["", "w", "a", "b", "demo", "unix:/x", "\x00", "é" * 1_025])
BYTES = st.sampled_from([b"", b"\0" * 7, b"\xff" * 64])
BY_TYPE = {
    FieldDescriptor.TYPE_UINT32: INTEGERS,
    FieldDescriptor.TYPE_UINT64: WIDE,
    FieldDescriptor.TYPE_INT32: SIGNED,
    FieldDescriptor.TYPE_INT64: SIGNED,
    FieldDescriptor.TYPE_DOUBLE: FLOATS,
    FieldDescriptor.TYPE_FLOAT: FLOATS,
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BYTES: BYTES,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_ENUM: st.sampled_from([0, 1, 3, 77]),
}


def fields(described: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the fields of a message, as arguments of its class."""
    values = {}
    for field in described.fields:
        if field.message_type:
            one: st.SearchStrategy[Any] = messages(GetMessageClass(field.message_type))
        else:
            one = BY_TYPE[field.type]
        values[field.name] = st.lists(one, max_size=2) if field.is_repeated else one
    return st.fixed_dictionaries({}, optional=values)


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    return fields(kind.DESCRIPTOR).map(lambda values: kind(**values))


hellos = fields(scheduler_pb2.WorkerHello.DESCRIPTOR)
worker_messages = messages(scheduler_pb2.WorkerMessage)
submit_messages = messages(scheduler_pb2.SubmitMessage)


async def require_serving(live: Live) -> None:
    """Another gateway's request is placed at another worker."""
    gateway, worker = live.gateway(), live.worker("good", model="good", address="unix:/good")
    await until(lambda: "good" in live.service.state.workers)
    gateway.say(submitted("good", model="good"))
    await until(lambda: "good" in run_step(gateway, "placed"))
    worker.leave()


def require_status(stream: Stream) -> None:
    """No exception but those that are a status. gRPC itself has another INTERNAL, for a message
    that is written when the stream has ended."""
    if stream.ended and stream.ended.code() is StatusCode.INTERNAL:
        assert stream.ended.details() == "Internal error from Core"


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(hellos, st.lists(worker_messages, max_size=4), st.lists(submit_messages, max_size=4))
def test_any_message_gets_a_status(
    hello: dict[str, Any], said: list[Message], submitted_: list[Message]
) -> None:
    async def attack() -> None:
        async with running() as live:
            live.texts.may.set()
            asked = live.gateway()
            asked.say(submitted("a"))
            hostile = [live.worker("w", **hello), live.worker("x"), live.gateway()]
            for message in said:
                for stream in hostile[:2]:
                    stream.say(message)
            for message in submitted_:
                hostile[2].say(message)
            await require_serving(live)
            for stream in hostile:
                stream.leave()
                await stream.reading
                require_status(stream)

    asyncio.run(attack())

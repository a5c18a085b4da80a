"""Memory of ended streams is freed at once: full collections would stop all streams."""

import gc

import pytest
from grpc import aio
from prometheus_client import CollectorRegistry

from protos.generated import ext_proc_pb2 as pb
from protos.generated import ext_proc_pb2_grpc
from services.picker.config import PickerConfig
from services.picker.core.endpoints import Reading
from services.picker.core.server_state import Flight
from services.picker.exchange import Exchange
from services.picker.service import PickerService, clock
from tests.picker.test_exchange import (
    BODY,
    request_body,
    request_headers,
    response_body,
    response_headers,
    token,
)
from tests.reach import reaching, until

NAME = "envoy.service.ext_proc.v3.ExternalProcessor"
ADDRESS = "10.0.0.1:80"
ANSWER = (
    response_headers("200"),
    response_body(token("a")),
    response_body(token("b", "stop"), end=True),
)


@pytest.mark.parametrize("end", ["complete", "broken", "refused"])
async def test_ended_streams_are_freed_without_the_garbage_collector(end: str) -> None:
    service = PickerService(PickerConfig(endpoints=(ADDRESS,)), CollectorRegistry())
    if end != "refused":
        service._on_reading(
            ADDRESS,
            Reading(kv_tokens=10_000),
            clock(),
        )
    add = ext_proc_pb2_grpc.add_ExternalProcessorServicer_to_server
    channel: aio.Channel
    async with reaching("socket", NAME, add, service) as channel:
        stub = ext_proc_pb2_grpc.ExternalProcessorStub(channel)

        async def exchange() -> None:
            call = stub.Process()
            await call.write(request_headers())
            await call.write(request_body(BODY))
            answer = await call.read()
            assert isinstance(answer, pb.ProcessingResponse)
            assert answer.HasField("immediate_response") == (end == "refused")
            if end == "broken":
                call.cancel()
                return
            if end == "complete":
                assert await call.read() is not aio.EOF  # the body
                for message in ANSWER:
                    await call.write(message)
                    assert await call.read() is not aio.EOF
            await call.done_writing()
            assert await call.read() is aio.EOF

        await exchange()  # what is made once
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                await exchange()
            await until(lambda: not _count(Exchange))
            assert not _count(Flight)
        finally:
            gc.enable()


def _count(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())

"""Calls that the server ends: those that had no answer yet are sent again, and others raise."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import pytest
from grpc import StatusCode

from foretoken import AsyncClient, Client, Unavailable
from foretoken.client.answers import Answer
from foretoken.running.ports import free_ports
from protos.generated import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.runtime.server import Mount, Server

USERS, RESTARTS = 8, 12
STOP = common_pb2.FINISH_REASON_STOP

Ask = Callable[[str, str], Answer]  # address and prompt → answer


class EndingGateway(gateway_pb2_grpc.GatewayServicer):
    """Ends its first `ends` calls, each after `before` parts of its answer."""

    def __init__(self, ends: int, before: int):
        self.calls = 0
        self._ends, self._before = ends, before

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        self.calls += 1
        for number in range(2):
            if self.calls <= self._ends and number == self._before:
                await context.abort(StatusCode.CANCELLED, "")
            reason = STOP if number else common_pb2.FINISH_REASON_UNSPECIFIED
            yield gateway_pb2.GenerateResponse(text=f"{number} ", finish_reason=reason)
            await asyncio.sleep(0.005)

    async def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        raise NotImplementedError

    async def Why(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


def ask(address: str, prompt: str) -> Answer:
    with Client(address) as client:
        return client.complete(prompt)


def ask_async(address: str, prompt: str) -> Answer:
    async def complete() -> Answer:
        async with AsyncClient(address) as client:
            return await client.complete(prompt)

    return asyncio.run(complete())


def serve(gateway: EndingGateway) -> Server:
    add = gateway_pb2_grpc.add_GatewayServicer_to_server
    return Server([Mount("foretoken.v1.Gateway", add, gateway)], shared=True)


async def answer_of(gateway: EndingGateway, ask: Ask, prompt: str) -> Answer:
    server = serve(gateway)
    await server.start("127.0.0.1:0")
    try:
        return await asyncio.to_thread(ask, f"127.0.0.1:{server.port}", prompt)
    finally:
        await server.stop(0.5)


@pytest.mark.parametrize("ask", [ask, ask_async])
@pytest.mark.parametrize("prompt_bytes", [1, 2**20])
async def test_call_that_is_ended_before_its_answer_is_sent_again(
    ask: Ask, prompt_bytes: int
) -> None:
    gateway = EndingGateway(ends=2, before=0)
    answer = await answer_of(gateway, ask, "1" * prompt_bytes)
    assert (answer.text, gateway.calls) == ("0 1 ", 3)


@pytest.mark.parametrize("ask", [ask, ask_async])
async def test_call_that_is_ended_within_its_answer_is_no_complete_answer(ask: Ask) -> None:
    gateway = EndingGateway(ends=1, before=1)
    with pytest.raises(Unavailable, match=r"127.0.0.1:\d+ stopped before the answer was complete"):
        await answer_of(gateway, ask, "1")
    assert gateway.calls == 1


async def test_servers_that_replace_each_other_answer_every_call() -> None:
    [port] = free_ports(1)
    answers, over = count(), False

    async def use() -> None:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            while not over:
                assert (await client.complete("1")).text == "0 1 "
                next(answers)

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as users:
        server = serve(EndingGateway(0, 0))
        await server.start(f"127.0.0.1:{port}")
        stack.push_async_callback(server.stop, 0.5)
        for _ in range(USERS):
            users.create_task(use())
        for _ in range(RESTARTS):
            await asyncio.sleep(0.1)
            successor = serve(EndingGateway(0, 0))
            await successor.start(f"127.0.0.1:{port}")
            await server.stop(30.0)
            stack.push_async_callback(successor.stop, 0.5)
            server = successor
        over = True
    assert next(answers) >= USERS * RESTARTS

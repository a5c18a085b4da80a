"""EngineRunner: the event loop's interface to the engine's thread. Neither waits for a step."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol

from services.worker.engine.mailbox import (
    Call,
    Command,
    Inbox,
    Listener,
    Outbox,
    Perform,
    QueryDrained,
    Stop,
)
from services.worker.engine.pulse import Pulse

MAX_WAITING_COMMANDS = 8_192  # stream readers then wait for the engine


class Body(Protocol):
    """What the engine's thread does. It takes commands from an inbox, and posts calls of a listener
    to the event loop."""

    def run(self) -> None:
        """Runs until `Stop`. Raises what the worker cannot survive."""


MakeBody = Callable[[Inbox, Callable[[Call], None], Listener], Body]


def engine_thread() -> ThreadPoolExecutor:
    """The thread that loads an engine, measures it and runs it. OpenMP keeps a pool of threads for
    each thread that has computed, and with more threads than cores in all pools their members sleep
    instead of spinning between two products: a second pool costs a quarter of the speed."""
    return ThreadPoolExecutor(1, "engine")


class EngineRunner(Listener):
    """Sends commands to the engine's thread, and makes its calls in the event loop. Commands sent
    before `run` wait for it. `thread` is the one that loaded the engine; it ends with `run`."""

    def __init__(self, make_body: MakeBody, thread: Executor):
        super().__init__()
        self._thread = thread
        self._drained = asyncio.Event()
        self.on_drained = self._drained.set
        self._inbox = Inbox()
        self._outbox: Outbox | None = None  # while it runs
        self._body = make_body(self._inbox, self._post, self)
        self.pulse = Pulse(lambda call: self.send(Perform(call)))

    def send(self, command: Command) -> None:
        """Queues a command. Any thread; commands are handled in order, between two steps."""
        self._inbox.put(command)

    async def run(self) -> None:
        """Runs until cancelled, then finishes the current step. Raises what ended the thread."""
        loop = asyncio.get_running_loop()
        self._outbox = Outbox(loop)
        ended = loop.run_in_executor(self._thread, self._body.run)
        try:
            await asyncio.shield(ended)
        finally:
            self.send(Stop())
            await asyncio.wait([ended])
            self._thread.shutdown()
            self._outbox.deliver()
            ended.exception()  # retrieved, in case cancellation came first

    async def wait_for_room(self) -> None:
        """Returns once the inbox has room. Stream readers await it before they read on."""
        if len(self._inbox) >= MAX_WAITING_COMMANDS:
            await self._query_drained()

    async def drain(self) -> None:
        """Returns once no request runs or is about to."""
        self._drained.clear()
        while not await self._query_drained():
            await self._drained.wait()
            self._drained.clear()

    async def _query_drained(self) -> bool:
        """Whether the worker is drained, once all earlier commands have been handled."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def set_answer(drained: bool) -> None:
            if not answer.done():
                answer.set_result(drained)

        self.send(QueryDrained(set_answer))
        return await answer

    def _post(self, call: Call) -> None:
        assert self._outbox is not None, "the engine's thread only runs within `run`"
        self._outbox.post(call)

"""EngineRunner: the engine as the event loop sees it. Ask, and be told; neither ever waits for a
step."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from services.core import HeldRequest, Plan, Report
from services.worker.engine.engine import Engine
from services.worker.engine.mailbox import Call, Inbox, Outbox
from services.worker.engine.thread import EngineThread, ErrorSink
from services.worker.metrics import WorkerMetrics
from services.worker.requests.batch import NewToken
from services.worker.requests.prompt import Prompt

UNTAKEN_MAX = 8_192  # calls that readers put in before they wait for the engine to take them

T = TypeVar("T")


class EngineRunner:
    """Hands what is asked to the engine's thread, in order, and makes its callbacks in the loop.

    What is asked before `run` waits for it.
    """

    def __init__(self, engine: Engine, metrics: WorkerMetrics):
        self.on_tokens: Callable[[list[NewToken]], None] = lambda _: None
        self.on_error: ErrorSink = lambda *_: None
        self.on_report: Callable[[Report], None] = lambda _: None
        self._drained = asyncio.Event()
        self.on_drained: Call = self._drained.set
        self._inbox = Inbox()
        self._outbox: Outbox | None = None  # while it runs
        self._thread = EngineThread(engine, metrics, self._inbox, self._post, self)

    # Asked by gateways

    def opened(self, origin: str) -> None:
        """A gateway's stream is there: prompts come on it, and their tokens are read."""
        self._inbox.put(partial(self._thread.opened, origin))

    def closed(self, origin: str) -> None:
        """Its tokens are lost; without a scheduler to cancel its requests, they go."""
        self._inbox.put(partial(self._thread.closed, origin))

    def receive(self, prompt: Prompt) -> None:
        """One that can never run here is told as an error."""
        self._inbox.put(partial(self._thread.receive, prompt))

    def refuse(self, request_id: str) -> None:
        self._inbox.put(partial(self._thread.refuse, request_id))

    # Asked by schedulers

    def attach(self, greet: Callable[[tuple[HeldRequest, ...]], None]) -> None:
        """A scheduler listens from now on. `greet` is told who is here, for it to adopt; reports
        come after that, at once with what happened while nobody listened."""
        self._inbox.put(partial(self._thread.attach, greet))

    def detach(self, gone: Call) -> None:
        """No scheduler listens any more, and no report comes after `gone` is called. Whoever is
        here goes on inside its budget, and what happens is kept for the next."""
        self._inbox.put(partial(self._thread.detach, gone))

    def untold(self, reports: Iterable[Report]) -> None:
        """These reports went unsent: what they say goes into the next."""
        self._inbox.put(partial(self._thread.untold, tuple(reports)))

    def apply(self, plan: Plan) -> None:
        self._inbox.put(partial(self._thread.apply, plan))

    def reset(self) -> None:
        """Drop all requests: no scheduler has come for them."""
        self._inbox.put(self._thread.reset)

    # Its life

    async def run(self) -> None:
        """Until cancelled; the step under way is finished then. Raises what ended the thread."""
        loop = asyncio.get_running_loop()
        self._outbox = Outbox(loop)
        ended: asyncio.Future[None] = loop.create_future()
        thread = threading.Thread(target=self._run, args=(loop, ended), name="engine", daemon=True)
        thread.start()
        try:
            await asyncio.shield(ended)
        finally:
            self._inbox.put(self._thread.stop)
            await asyncio.wait([ended])
            thread.join()
            self._outbox.deliver()
            ended.exception()  # looked at, where cancelling was faster than it

    def _run(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        try:
            self._thread.run()
        except BaseException as error:
            loop.call_soon_threadsafe(ended.set_exception, error)
        else:
            loop.call_soon_threadsafe(ended.set_result, None)

    async def ready(self) -> None:
        """Return once the inbox has room: what readers await before they read on."""
        if len(self._inbox) >= UNTAKEN_MAX:
            await self._asked(lambda: None)

    async def drain(self) -> None:
        """Return once nobody runs here, nor was admitted and is awaited."""
        self._drained.clear()
        while not await self._asked(lambda: self._thread.drained):
            await self._drained.wait()
            self._drained.clear()

    async def _asked(self, ask: Callable[[], T]) -> T:
        """What `ask` says in the engine's thread, once all asked before has been done."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def answered(value: T) -> None:
            if not answer.done():
                answer.set_result(value)

        self._inbox.put(lambda: self._post(partial(answered, ask())))
        return await answer

    def _post(self, call: Call) -> None:
        assert self._outbox is not None, "the engine's thread runs under `run` alone"
        self._outbox.post(call)

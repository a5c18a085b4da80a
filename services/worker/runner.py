"""The engine's place in the event loop: step, post, let the loop breathe, again.

There is no engine thread. Plans, prompts and cancels are applied by the loop's own handlers, which
run between two steps only, so what has arrived counts in the very next step.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from services.core import Plan, Report
from services.worker.batch import NewToken
from services.worker.engine import Engine, StepFailed
from services.worker.metrics import WorkerMetrics
from services.worker.prompt import Prompt

log = logging.getLogger(__name__)

YIELDS = 3  # turns the loop gets between steps: poll sockets, wake the handler, let it answer
IDLE_S = 5.0  # how often an idle worker looks for halves that waited too long
FAILURES_MAX = 3  # steps broken in a row before the process gives up

ErrorSink = Callable[[Prompt, int, str], None]  # the prompt, its next offset, a sentence


class EngineRunner:
    """Runs the engine whenever it has work. Its callbacks are called between steps."""

    def __init__(self, engine: Engine, metrics: WorkerMetrics):
        self.engine = engine
        self._metrics = metrics
        self._wake = asyncio.Event()
        self._emptied = asyncio.Event()
        self.on_tokens: Callable[[list[NewToken]], None] = lambda _: None
        self.on_error: ErrorSink = lambda *_: None
        self.on_report: Callable[[Report], None] = lambda _: None
        self._failures = 0

    def receive(self, prompt: Prompt) -> None:
        why = self.engine.add(prompt, time.monotonic())
        if why:
            self.on_error(prompt, len(prompt.token_ids) - prompt.prompt_tokens, why)
        self._wake.set()

    def refuse(self, request_id: str) -> None:
        self.engine.state.refuse(request_id)
        self._wake.set()

    def apply(self, plan: Plan) -> None:
        self.engine.apply(plan, time.monotonic())
        self._wake.set()

    def reset(self) -> None:
        """Drop all requests: the scheduler they came from is gone and will have them again."""
        self.engine.reset()

    async def run(self) -> None:
        """Until cancelled. Raises the cause when steps keep breaking."""
        while True:
            self._wake.clear()
            worked = self._step()
            self._report()
            if worked:
                for _ in range(YIELDS):
                    await asyncio.sleep(0)
            else:
                await self._rest()

    async def drain(self) -> None:
        """Return once no request is left."""
        while not self.engine.state.idle:
            self._emptied.clear()
            await self._emptied.wait()

    async def _rest(self) -> None:
        if self.engine.state.idle:
            self._emptied.set()
        try:
            async with asyncio.timeout(IDLE_S):
                await self._wake.wait()
        except TimeoutError:
            self.engine.state.expire(time.monotonic())

    def _step(self) -> bool:
        """Whether there was anything to do."""
        try:
            result = self.engine.step()
        except StepFailed as failure:
            self._failed(failure)
            return True
        if result is None:
            return False
        self._failures = 0
        self._metrics.stepped(result)
        self.on_tokens(result.tokens)
        return True

    def _failed(self, failure: StepFailed) -> None:
        """Tell those it hit; the rest goes on, unless it happens again and again."""
        self._failures += 1
        log.error("%s", failure, exc_info=failure.__cause__)
        for sequence in failure.sequences:
            why = "the model failed on a batch with this request; the worker's log says more"
            self.on_error(sequence.prompt, sequence.output_tokens, why)
        if self._failures >= FAILURES_MAX:
            raise RuntimeError(f"{self._failures} steps in a row failed") from failure.__cause__

    def _report(self) -> None:
        report = self.engine.report()
        if report:
            self._metrics.reported(report)
            self.on_report(report)

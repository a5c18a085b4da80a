"""The engine's place in the event loop: step, post, let the loop breathe, again.

There is no engine thread. Plans, prompts and cancels are applied by the loop's own handlers, which
run between two steps only, so what has arrived counts in the very next step.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from services.core import HeldRequest, Plan, Report
from services.worker.engine.engine import Engine, StepFailed
from services.worker.kv.residency import DEFAULT, RESIDENCIES
from services.worker.metrics import WorkerMetrics
from services.worker.requests.batch import NewToken
from services.worker.requests.prompt import Prompt

log = logging.getLogger(__name__)

YIELDS = 3  # turns the loop gets between steps: poll sockets, wake the handler, let it answer
EXPIRE_S = 5.0  # how often it looks for halves that waited too long, idle or busy
FAILURES_MAX = 3  # requests failed alone in a row, and all else too, before the process gives up

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
        self._expire_at_s = 0.0
        self._attached = False
        self._streams: set[str] = set()  # of gateways, open now
        self._unknown = ""  # the last plan's residency, where nobody here knows it

    def opened(self, origin: str) -> None:
        """A gateway's stream is there: prompts come on it, and their tokens are read."""
        self._streams.add(origin)

    def closed(self, origin: str) -> None:
        """Its tokens are lost; without a scheduler to cancel its requests, they go at once."""
        self._streams.discard(origin)
        if not self._attached:
            self._forget_unread()

    def attach(self) -> tuple[HeldRequest, ...]:
        """A scheduler listens from now on. Returns who is here, for it to adopt."""
        self._attached = True
        return self.engine.attach()

    def detach(self, untold: Iterable[Report]) -> None:
        """No scheduler listens any more, and these reports went unsent. Whoever is here goes on
        inside its budget, and what happens is kept for the next."""
        self._attached = False
        self.engine.state.untold(untold)
        self._forget_unread()

    def _forget_unread(self) -> None:
        self.engine.state.keep_only(self._streams)
        self._wake.set()

    def receive(self, prompt: Prompt) -> None:
        why = self.engine.add(prompt, time.monotonic())
        if why:
            self.on_error(prompt, len(prompt.token_ids) - prompt.prompt_tokens, why)
        self._wake.set()

    def refuse(self, request_id: str) -> None:
        self.engine.state.refuse(request_id)
        self._wake.set()

    def apply(self, plan: Plan) -> None:
        self._look_at(plan.residency)
        self.engine.apply(plan, time.monotonic())
        self._wake.set()

    def _look_at(self, residency: str) -> None:
        """Say it once where plans ask for a policy that this worker does not have."""
        known = not residency or residency in RESIDENCIES
        if not known and residency != self._unknown:
            self._unknown = residency
            log.warning("plans ask for residency %r, unknown here: %s it is", residency, DEFAULT)

    def reset(self) -> None:
        """Drop all requests: no scheduler has come for them."""
        self.engine.reset()
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled. Raises the cause when steps keep breaking."""
        while True:
            self._wake.clear()
            worked = self._step()
            self._expire()
            self.report()
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
        with suppress(TimeoutError):
            async with asyncio.timeout(EXPIRE_S):
                await self._wake.wait()

    def _expire(self) -> None:
        """Now and then give up on halves that waited too long. Costs a look at the clock."""
        now = time.monotonic()
        if now >= self._expire_at_s:
            self._expire_at_s = now + EXPIRE_S
            self.engine.state.expire(now)

    def _step(self) -> bool:
        """Whether there was anything to do."""
        try:
            result = self.engine.step()
        except StepFailed as failure:
            self._failed(failure)
            return True
        if late := self.engine.state.take_late():
            self._metrics.told(len(late))
            self.on_tokens(late)
        if result is None:
            return False
        self._failures = 0
        self._metrics.stepped(result)
        self.on_tokens(result.tokens)
        return True

    def _failed(self, failure: StepFailed) -> None:
        """Tell who failed alone, and go on; unless it happens again and again, while nothing else
        can be computed either. Others that fail alone, as the choices of one bad prompt do, are no
        reason to end."""
        if not failure.sequences:
            log.warning("%s: %r", failure, failure.__cause__)
            return
        log.error("%s", failure, exc_info=failure.__cause__)
        for sequence in failure.sequences:
            why = "the model failed on this request; the worker's log says more"
            self.on_error(sequence.prompt, sequence.output_tokens, why)
        self._failures = 0 if self.engine.works() else self._failures + 1
        if self._failures >= FAILURES_MAX:
            raise RuntimeError(f"{self._failures} steps in a row failed") from failure.__cause__

    def report(self) -> None:
        """Tell what there is to tell, if a scheduler listens."""
        if self._attached and (report := self.engine.report()):
            self._metrics.reported(report)
            self.on_report(report)

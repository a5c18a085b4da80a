"""EngineThread: take what has arrived, step, tell, again; in a thread of its own.

The engine is touched by this thread alone. What others ask of it are calls in its inbox, which is
drained whole between two steps; so whatever arrived during a step counts in the very next, and
neither streams nor health ever wait for one. What it has to tell are calls for the event loop.
"""

import logging
import time
from collections.abc import Callable, Iterable
from math import inf
from typing import Protocol

from observability.logs import trace_id_of
from services.core import HeldRequest, Plan, Report
from services.worker.engine.engine import Engine, StepFailed
from services.worker.engine.mailbox import Call, Inbox
from services.worker.kv.residency import DEFAULT, RESIDENCIES
from services.worker.metrics import WorkerMetrics
from services.worker.requests.batch import NewToken
from services.worker.requests.prompt import Prompt

log = logging.getLogger(__name__)

HALF_S = 1.0  # the prompt of who was admitted is normally milliseconds away
EXPIRE_S = 5.0  # how often it looks for halves that waited too long, idle or busy
FAILURES_MAX = 3  # requests failed alone in a row, and all else too, before the process gives up

ErrorSink = Callable[[Prompt, int, str], None]  # the prompt, its next offset, a sentence


class Listener(Protocol):
    """Who is told, in the event loop. Each is looked up when it is called: it may change."""

    on_tokens: Callable[[list[NewToken]], None]
    on_error: ErrorSink
    on_report: Callable[[Report], None]
    on_drained: Call  # nobody runs or is awaited


class EngineThread:
    """`run` is the thread; every other method is called by it alone, from its inbox."""

    def __init__(
        self,
        engine: Engine,
        metrics: WorkerMetrics,
        inbox: Inbox,
        post: Callable[[Call], None],
        listener: Listener,
    ):
        self._engine = engine
        self._metrics = metrics
        self._inbox = inbox
        self._post = post
        self._listener = listener
        self._stopping = False
        self._failures = 0
        self._expire_at_s = 0.0
        self._attached = False
        self._streams: set[str] = set()  # of gateways, open now
        self._unknown = ""  # the last plan's residency, where nobody here knows it

    def run(self) -> None:
        """Until stopped. Raises the cause when steps keep breaking."""
        self._engine.enter_thread()
        worked = False
        while True:
            for call in self._inbox.take(0.0 if worked else EXPIRE_S):
                call()
            if self._stopping:
                return
            worked = self._step()
            self._expire()
            self._report()
            if not worked and self.drained:
                self._post(lambda: self._listener.on_drained())

    def stop(self) -> None:
        self._stopping = True

    @property
    def drained(self) -> bool:
        """Nobody runs, nobody was just admitted whose prompt is on its way, and nothing is
        computed. A prompt whose plan never came, and who rests here, are nobody's to wait for:
        they are resubmitted."""
        state = self._engine.state
        if state.running or state.in_flight:
            return False
        halves = state.pending.admissions.values()
        since_s = max((since_s for _, since_s in halves), default=-inf)
        return time.monotonic() - since_s > HALF_S

    # Gateways

    def opened(self, origin: str) -> None:
        self._streams.add(origin)

    def closed(self, origin: str) -> None:
        """Its tokens are lost; without a scheduler to cancel its requests, they go at once."""
        self._streams.discard(origin)
        if not self._attached:
            self._engine.state.keep_only(self._streams)

    def receive(self, prompt: Prompt) -> None:
        if why := self._engine.add(prompt, time.monotonic()):
            offset = len(prompt.token_ids) - prompt.prompt_tokens
            self._post(lambda: self._listener.on_error(prompt, offset, why))

    def refuse(self, request_id: str) -> None:
        self._engine.state.refuse(request_id)

    # Schedulers

    def attach(self, greet: Callable[[tuple[HeldRequest, ...]], None]) -> None:
        """Reports follow what `greet` is told, and what happened before comes at once."""
        self._attached = True
        held = self._engine.attach()
        self._post(lambda: greet(held))

    def detach(self, gone: Call) -> None:
        """No report comes after `gone`."""
        self._attached = False
        self._engine.state.keep_only(self._streams)
        self._post(gone)

    def untold(self, reports: Iterable[Report]) -> None:
        self._engine.state.untold(reports)

    def apply(self, plan: Plan) -> None:
        self._look_at(plan.residency)
        self._engine.apply(plan, time.monotonic())

    def _look_at(self, residency: str) -> None:
        """Say it once where plans ask for a policy that this worker does not have."""
        known = not residency or residency in RESIDENCIES
        if not known and residency != self._unknown:
            self._unknown = residency
            log.warning("plans ask for residency %r, unknown here: %s it is", residency, DEFAULT)

    def reset(self) -> None:
        self._engine.reset()

    # Between them

    def _expire(self) -> None:
        """Now and then give up on halves that waited too long. Costs a look at the clock."""
        now = time.monotonic()
        if now >= self._expire_at_s:
            self._expire_at_s = now + EXPIRE_S
            self._engine.state.expire(now)

    def _step(self) -> bool:
        """Whether there was anything to do."""
        try:
            result = self._engine.step()
        except StepFailed as failure:
            self._failed(failure)
            return True
        if late := self._engine.state.take_late():
            self._metrics.told(len(late))
            self._post(lambda: self._listener.on_tokens(late))
        if result is None:
            return False
        self._failures = 0
        self._metrics.stepped(result)
        if result.tokens:
            self._post(lambda: self._listener.on_tokens(result.tokens))
        return True

    def _failed(self, failure: StepFailed) -> None:
        """Tell who failed alone, and go on; unless it happens again and again, while nothing else
        can be computed either. Others that fail alone, as the choices of one bad prompt do, are no
        reason to end."""
        if not failure.sequences:
            log.warning("%s: %r", failure, failure.__cause__)
            return
        first = failure.sequences[0]
        trace_id = trace_id_of(first.prompt.traceparent)
        whose = {"request_id": first.request_id, "trace_id": trace_id}
        log.error("%s", failure, exc_info=failure.__cause__, extra=whose)
        for prompt, offset in [(s.prompt, s.output_tokens) for s in failure.sequences]:
            self._tell_failed(prompt, offset)
        self._failures = 0 if self._engine.works() else self._failures + 1
        if self._failures >= FAILURES_MAX:
            raise RuntimeError(f"{self._failures} steps in a row failed") from failure.__cause__

    def _tell_failed(self, prompt: Prompt, offset: int) -> None:
        why = "the model failed on this request; the worker's log says more"
        self._post(lambda: self._listener.on_error(prompt, offset, why))

    def _report(self) -> None:
        """Tell what there is to tell, if a scheduler listens."""
        if self._attached and (report := self._engine.report()):
            self._post(lambda: self._listener.on_report(report))

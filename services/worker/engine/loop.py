"""EngineLoop: the engine's thread. It handles commands, steps, reports, and repeats.

Only this thread accesses the engine. It handles all waiting commands between two steps, so that a
command that arrives during a step takes effect in the next one, and neither streams nor health
checks wait for a step. Results are posted as calls to the event loop.

A plan's path: Attach stream → `ApplyPlan` in the inbox → `WorkerState.apply_plan` → the next step.
"""

import logging
import time
from collections.abc import Callable
from math import inf

from observability.logs import trace_id_of
from services.core import Plan
from services.worker.engine.interface import StepFailed, WorkerEngine
from services.worker.engine.mailbox import (
    AddPrompt,
    ApplyPlan,
    AttachScheduler,
    Call,
    CloseStream,
    Command,
    DetachScheduler,
    GatewayCommand,
    Inbox,
    Listener,
    OpenStream,
    Perform,
    QueryDrained,
    RefuseRequest,
    Reset,
    ReturnReports,
    SchedulerCommand,
    Stop,
)
from services.worker.kv.residency import DEFAULT, RESIDENCIES
from services.worker.metrics import WorkerMetrics
from services.worker.requests.pending import PROMPT_WAIT_S
from services.worker.requests.types.prompt import Prompt

log = logging.getLogger(__name__)

EXPIRE_INTERVAL_S = 5.0  # between two checks for prompts and plans that waited too long
INTEGRITY_INTERVAL_S = 60.0  # at least, between two integrity checks of an idle worker
MAX_FAILURES = 3  # consecutive failures of single requests, if a probe fails, too


class EngineLoop:
    """The body of the engine's thread is `run`."""

    def __init__(
        self,
        engine: WorkerEngine,
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
        self._expire_at_s = self._check_at_s = 0.0
        self._attached = False
        self._streams: set[str] = set()  # open streams of gateways
        self._unknown_residency = ""  # of the last plan

    def run(self) -> None:
        """Runs until `Stop`. Raises the cause if steps fail repeatedly."""
        self._engine.enter_thread()
        worked = False
        while True:
            for command in self._inbox.pop_all(0.0 if worked else EXPIRE_INTERVAL_S):
                self._handle(command)
            if self._stopping:
                return
            worked = self._step()
            self._expire()
            self._report()
            if not worked:
                self._on_idle()

    def _handle(self, command: Command) -> None:
        match command:
            case QueryDrained(answer):
                drained = self._is_drained()
                self._post(lambda: answer(drained))
            case Perform(work):
                work()
            case Stop():
                self._stopping = True
            case AddPrompt() | RefuseRequest() | OpenStream() | CloseStream():
                self._handle_gateway(command)
            case _:
                self._handle_scheduler(command)

    def _handle_gateway(self, command: GatewayCommand) -> None:
        state = self._engine.state
        match command:
            case AddPrompt(prompt):
                # A prompt that must wait arrives again, as if it had been sent later.
                if not self._engine.prepare(prompt, lambda: self._inbox.put(command)):
                    return
                if refusal := self._engine.add(prompt, time.monotonic()):
                    self._post_refusal(prompt, refusal)
                else:
                    self._metrics.record_request(prompt.adapter)
            case RefuseRequest(request_id):
                state.refuse(request_id)
            case OpenStream(origin):
                self._streams.add(origin)
            case CloseStream(origin):
                self._streams.discard(origin)
                if not self._attached:
                    state.keep_only(self._streams)

    def _handle_scheduler(self, command: SchedulerCommand) -> None:
        state = self._engine.state
        match command:
            case ApplyPlan(plan):
                self._check_residency(plan)
                state.apply_plan(plan, time.monotonic())
            case AttachScheduler(on_attached):
                self._attached = True
                held = state.attach()
                self._post(lambda: on_attached(held))
            case DetachScheduler(on_detached):
                self._attached = False
                state.keep_only(self._streams)
                self._post(on_detached)
            case ReturnReports(reports):
                state.return_reports(reports)
            case Reset():
                self._engine.reset()

    def _check_residency(self, plan: Plan) -> None:
        """Warns once about a residency policy that this worker does not have."""
        residency = plan.residency
        unknown = bool(residency) and residency not in RESIDENCIES
        if unknown and residency != self._unknown_residency:
            self._unknown_residency = residency
            log.warning(
                "the scheduler's plan names the residency policy %r, which this worker does not "
                "have; it uses %s",
                residency,
                DEFAULT,
            )

    def _is_drained(self) -> bool:
        """Whether no request runs, is computed, or was just admitted before its prompt arrived.

        Prompts without a plan and paused requests do not count: they are resubmitted elsewhere.
        """
        state = self._engine.state
        if state.busy:
            return False
        since_s = max(state.awaited_since_s, default=-inf)
        return time.monotonic() - since_s > PROMPT_WAIT_S

    def _on_idle(self) -> None:
        if self._is_drained():
            self._post(lambda: self._listener.on_drained())
        now = time.monotonic()
        if self._engine.state.idle and now >= self._check_at_s:
            self._check_at_s = now + INTEGRITY_INTERVAL_S
            self._check_integrity()

    def _check_integrity(self) -> None:
        try:
            self._engine.state.check_integrity()
        except AssertionError as error:  # a defect of the worker
            log.error("the worker's state is inconsistent (%s); the process ends", error)
            raise

    def _expire(self) -> None:
        """Drops prompts and admissions that waited too long. Usually it only reads the clock."""
        now = time.monotonic()
        if now >= self._expire_at_s:
            self._expire_at_s = now + EXPIRE_INTERVAL_S
            self._engine.state.expire(now)

    def _step(self) -> bool:
        """Computes one step; returns whether there was anything to compute."""
        try:
            result = self._engine.step()
        except StepFailed as failure:
            self._on_failure(failure)
            return True
        if late := self._engine.state.pop_late():
            self._metrics.record_tokens(len(late))
            self._post(lambda: self._listener.on_tokens(late))
        if result is None:
            return False
        self._failures = 0
        self._metrics.record_step(result)
        if result.tokens:
            self._post(lambda: self._listener.on_tokens(result.tokens))
        for sequence, why in result.failed:
            self._post_error(sequence.prompt, sequence.output_tokens, why)
        return True

    def _on_failure(self, failure: StepFailed) -> None:
        """Ends the requests that failed alone and continues.

        Raises RuntimeError after MAX_FAILURES in a row if the engine cannot compute a probe either.
        Independent failures, such as all choices of one bad prompt, do not end the process.
        """
        if not failure.sequences:
            log.warning("%s: %r", failure, failure.__cause__)
            return
        first = failure.sequences[0]
        context = {
            "request_id": first.request_id,
            "trace_id": trace_id_of(first.prompt.traceparent),
        }
        log.error("%s", failure, exc_info=failure.__cause__, extra=context)
        message = "the model failed on this request; the worker's log has the details"
        for sequence in failure.sequences:
            self._post_error(sequence.prompt, sequence.output_tokens, message)
        self._failures = 0 if self._engine.can_compute() else self._failures + 1
        if self._failures >= MAX_FAILURES:
            raise RuntimeError(f"{self._failures} steps in a row failed") from failure.__cause__

    def _post_error(self, prompt: Prompt, offset: int, message: str) -> None:
        self._post(lambda: self._listener.on_error(prompt, offset, message))

    def _post_refusal(self, prompt: Prompt, why: str) -> None:
        self._post(lambda: self._listener.on_refusal(prompt, why))

    def _report(self) -> None:
        if self._attached and (report := self._engine.state.report()):
            self._post(lambda: self._listener.on_report(report))

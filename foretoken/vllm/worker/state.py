"""VllmState: the effects of prompts and plans on a worker with vLLM's engine. Pure, without I/O.

It stands in the place of `WorkerState`. vLLM owns the KV, so that a plan has fewer effects here:

    pause, with any residency      The KV is dropped; vLLM's prefix cache may still find it.
    a budget                       A request that has used it up is reported, and continues until a
                                   plan pauses it.
    static batches, prefetch       ignored, with a warning for the former
"""

import logging
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Protocol

from foretoken.vllm.worker.hosted_request import EngineRequest, Generated, HostedRequest
from services.core import FinishReason, Grant, HeldRequest, Plan, Report
from services.costs import StepTiming
from services.worker.engine.interface import DevicePool
from services.worker.kv.blocks import BlockPool
from services.worker.requests.pending import ExpectedCancels, PendingRequests
from services.worker.requests.reporting import ReportedPool, Reporter
from services.worker.requests.speculation import WEIGHT
from services.worker.requests.types.batch import NewToken, StepResult
from services.worker.requests.types.limits import Counters, Limits
from services.worker.requests.types.prompt import Prompt

log = logging.getLogger(__name__)


class VllmPool(DevicePool, ReportedPool, Protocol):
    """vLLM's blocks."""


class PlannedEngine(Protocol):
    """What plans change in vLLM. Requests have the names of vLLM here."""

    @property
    def pool(self) -> VllmPool: ...

    def start(self, name: str, prompt: Prompt) -> EngineRequest:
        """Adds a request, which waits until it is admitted."""

    def admit(self, name: str) -> None: ...

    def pause(self, names: Collection[str]) -> None:
        """Preempts these requests, and takes their admission back if they wait."""

    def abort(self, names: Collection[str]) -> None: ...

    def set_victims(self, names: Sequence[str]) -> None:
        """The order of preemption when memory runs out."""


class VllmState:
    """One replica's requests, from plan and prompt to their end."""

    def __init__(self, limits: Limits, engine: PlannedEngine):
        self.limits = limits
        self.counters = Counters()
        self.host = BlockPool(0, limits.block_tokens)
        self.sequences: dict[str, HostedRequest] = {}
        self.running: dict[str, HostedRequest] = {}  # in order of admission
        self._engine = engine
        self._named: dict[str, HostedRequest] = {}  # by their names in vLLM
        self._serials = count(1)
        self._failed: list[HostedRequest] = []
        self._warned_of_batches = False
        self.reset()

    def reset(self) -> None:
        """Drops everything; a step in flight has no effect."""
        self._engine.abort(self._named.keys())
        for requests in (self.sequences, self.running, self._named):
            requests.clear()
        self._failed.clear()
        self.pending = PendingRequests()
        self._expected_cancels = ExpectedCancels()
        self._reporter = Reporter(self.limits.report_every_steps)

    @contextmanager
    def without_drafts(self) -> Iterator[None]:
        """Drops everything at both ends. vLLM's drafts, if it has some, stay."""
        self.reset()
        try:
            yield
        finally:
            self.reset()

    @property
    def pool(self) -> VllmPool:
        return self._engine.pool

    def blocks(self) -> dict[str, int]:
        """The device blocks of each request that has some, including shared ones."""
        counted = ((r, self.pool.blocks_for(each.held_tokens)) for r, each in self.running.items())
        return {request_id: blocks for request_id, blocks in counted if blocks}

    @property
    def busy(self) -> bool:
        """Whether requests run or are computed."""
        return bool(self.running)

    @property
    def awaited_since_s(self) -> list[float]:
        """When the requests without a prompt were admitted."""
        return [since_s for _, since_s in self.pending.admissions.values()]

    @property
    def idle(self) -> bool:
        """No request is here or expected."""
        return not (self.sequences or self.pending)

    def attach(self) -> tuple[HeldRequest, ...]:
        """Attaches a scheduler, as WorkerState.attach does."""
        self._expected_cancels.clear()
        for prompt in self.pending.pop_prompts():
            self._place(prompt, prompt.delivered_tokens)
        blocks = self.blocks()
        self._reporter.begin(self.sequences, blocks)
        return tuple(s.held(blocks.get(s.request_id, 0)) for s in self.sequences.values())

    def return_reports(self, reports: Collection[Report]) -> None:
        """Puts the ends and evictions of reports that were not sent into the next one."""
        self._reporter.restore(reports, self._waiting)

    def _waiting(self, request_id: str) -> HostedRequest | None:
        request = self.sequences.get(request_id)
        return request if request and not request.runs else None

    def keep_only(self, origins: Container[str]) -> None:
        """Drops requests of other gateway streams, because their tokens cannot be delivered."""
        here = [request.prompt for request in self.sequences.values()]
        for request_id in self.pending.of_other_origins(here, origins):
            self._forget(request_id)

    # Prompts and plans

    def receive(self, prompt: Prompt, now: float) -> str | None:
        """Accepts a prompt, before or after the plan that admits it. Returns why it can never run
        here, in which case it is reported as an ERROR; else None. A request that is already here
        restarts after the delivered tokens of the prompt."""
        request_id = prompt.request_id
        if request_id in self.sequences:
            # It was moved away and back before the cancel of its earlier placement arrived.
            self._forget(request_id)
            self._expected_cancels.expect(request_id)
        if why := self.limits.refusal(prompt):
            self.refuse(request_id)
            return why
        limit_tokens = self.pending.add_prompt(prompt, now)
        if limit_tokens is not None:
            self._run(self._place(prompt, limit_tokens))
        return None

    def apply_plan(self, plan: Plan, now: float) -> None:
        """Applies a plan. A plan with a seq that was applied before changes nothing."""
        if plan.seq <= self._reporter.applied_plan_seq:
            return
        for request_id in plan.cancel:
            self._cancel(request_id)
        self._pause([pause.request_id for pause in plan.pause])
        for grant in plan.admit:
            self._admit(grant, now)
        for grant in plan.extend:
            self._extend(grant)
        if plan.batches and not self._warned_of_batches:
            self._warned_of_batches = True
            log.warning("the scheduler's plans have static batches, but vLLM batches continuously")
        named = (self.running[r].name for r in plan.victims if r in self.running)
        self._engine.set_victims(tuple(named))
        self._reporter.record_plan(plan.seq)

    def refuse(self, request_id: str) -> None:
        """Reports a request that cannot begin as an ERROR, and drops an earlier placement of it."""
        self._forget(request_id)
        self._reporter.record_completion(request_id, 0, FinishReason.ERROR)

    def expire(self, now: float) -> None:
        """Drops prompts and admissions that waited too long for each other."""
        for request_id in self.pending.expire(now):
            self._reporter.record_completion(request_id, 0, FinishReason.ERROR)

    def report(self) -> Report | None:
        """What happened since the last report; None if nothing did."""
        return self._reporter.next_report(self)

    def _place(self, prompt: Prompt, limit_tokens: int) -> HostedRequest:
        name = f"{prompt.request_id}/{next(self._serials)}"
        request = HostedRequest.start(prompt, name, limit_tokens)
        self.sequences[prompt.request_id] = self._named[name] = request
        return request

    def _run(self, request: HostedRequest) -> None:
        if request.runs:
            return
        if request.engine_request is None:
            request.engine_request = self._engine.start(request.name, request.prompt)
        request.runs = True
        self.running[request.request_id] = request
        self._engine.admit(request.name)
        self._reporter.forget(request.request_id)  # its eviction is outdated

    def _admit(self, grant: Grant, now: float) -> None:
        request = self.sequences.get(grant.request_id)
        if request is None:
            prompt = self.pending.admit(grant.request_id, grant.limit_tokens, now)
            if prompt is None:
                return
            request = self._place(prompt, grant.limit_tokens)
        request.limit_tokens = grant.limit_tokens
        self._run(request)

    def _extend(self, grant: Grant) -> None:
        self.pending.extend(grant.request_id, grant.limit_tokens)
        if request := self.sequences.get(grant.request_id):
            request.limit_tokens = max(request.limit_tokens, grant.limit_tokens)

    def _pause(self, request_ids: Iterable[str]) -> None:
        paused = [self.running.pop(r) for r in request_ids if r in self.running]
        for request in paused:
            request.runs = False
            self._reporter.include(request)
        self._engine.pause({request.name for request in paused})
        self.counters.dropped += len(paused)

    def _cancel(self, request_id: str) -> None:
        if not self._expected_cancels.pop(request_id):
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """Frees everything of a request, and reports nothing about it; ignores an unknown one."""
        self.pending.forget(request_id)
        self._reporter.forget(request_id)
        if request := self._remove(request_id):
            self._engine.abort([request.name])

    def _remove(self, request_id: str) -> HostedRequest | None:
        self.running.pop(request_id, None)
        request = self.sequences.pop(request_id, None)
        if request:
            del self._named[request.name]
        return request

    # Steps

    def evict(self, names: Iterable[str]) -> None:
        """vLLM has preempted these because memory ran out."""
        for request in (self._named[name] for name in names if name in self._named):
            if self.running.pop(request.request_id, None):
                request.runs = False
                self._reporter.record_eviction(request)
                self.counters.evicted_dropped += 1

    def commit(self, generated: Iterable[Generated], timings: list[StepTiming]) -> StepResult:
        """Counts a step, and takes what vLLM has generated in it. Ignores requests that are gone.
        Those that vLLM has ended with an error are returned by `pop_failed`."""
        tokens: list[NewToken] = []
        decoded = rows = 0
        for each in generated:
            if request := self._named.get(each.name):
                if request.opened:
                    decoded, rows = decoded + len(each.token_ids), rows + 1
                tokens += self._extend_output(request, each)
        if decoded:  # more than rows if vLLM decodes speculatively
            reporter = self._reporter
            reporter.tokens_per_step += WEIGHT * (decoded / rows - reporter.tokens_per_step)
        self._reporter.record_step(timings)
        return StepResult(tokens, timings)

    def pop_failed(self) -> list[HostedRequest]:
        failed, self._failed = self._failed, []
        return failed

    def pop_late(self) -> list[NewToken]:
        """Nothing: there are no static batches."""
        return []

    def _extend_output(self, request: HostedRequest, generated: Generated) -> list[NewToken]:
        before, first = request.output_tokens, not request.opened
        if generated.finish is FinishReason.ERROR:
            self._failed.append(request)
            self._finish(request, FinishReason.ERROR)
            return []
        tokens = request.extend(generated)
        if first:
            self.counters.prefix_asked_tokens += len(request.prompt.token_ids)
            self.counters.prefix_hit_tokens += generated.opening.cached_tokens
        if generated.finish:
            self._finish(request, generated.finish)
        elif before < request.limit_tokens <= request.output_tokens:
            self._reporter.include(request)  # its slice has ended
        return tokens

    def _finish(self, request: HostedRequest, reason: FinishReason) -> None:
        request_id = request.request_id
        self._remove(request_id)
        self._reporter.forget(request_id)
        self._expected_cancels.discard(request_id)
        self._reporter.record_completion(request_id, request.output_tokens, reason)

    def check_integrity(self) -> None:
        """All redundant state agrees. Raises AssertionError."""
        by_name = {request.name: request for request in self.sequences.values()}
        running: Mapping[str, HostedRequest] = {r: s for r, s in self.sequences.items() if s.runs}
        assert by_name == self._named, "requests and names in vLLM differ"
        assert running == self.running, "the running requests differ"
        self.pending.check_integrity(self.sequences)

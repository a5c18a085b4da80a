"""WorkerState: the effects of prompts and plans on a worker. Pure, without I/O.

Prompts and plans change the running requests (`receive`, `apply_plan`); `steps` composes one step
and commits its tokens (step_cycle.py); `runs` computes equal steps at once (step_runs.py); `report`
returns what happened. A scheduler begins with `attach`. Without one there are no plans and no
reports, and requests continue within their budgets.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from services.core import FinishReason, Grant, HeldRequest, Pause, Plan, Report, Residency
from services.costs import SwapTiming
from services.worker.kv.blocks import BlockPool
from services.worker.kv.prefixes import PrefixListener
from services.worker.kv.transfers import TransferPlan
from services.worker.requests.ends import RequestEnds
from services.worker.requests.evictor import Evictor
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.pending import PendingRequests
from services.worker.requests.reporting import Reporter
from services.worker.requests.static_batching import StaticBatching
from services.worker.requests.step_cycle import StepCycle
from services.worker.requests.step_runs import StepRuns
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.limits import Counters, Limits
from services.worker.requests.types.lookup import NO_DRAFTS
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence, SequencePhase


class WorkerState:
    """One model replica's requests, from plan and prompt to their end."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.counters = Counters()
        self._listener: PrefixListener | None = None
        self.reset()

    def listen(self, listener: PrefixListener) -> None:
        """Calls `listener` for each change of the prefixes that the device has."""
        self._listener = self.pool.listener = listener

    def reset(self) -> None:
        """Drops everything; the step in flight has no effect."""
        limits = self.limits
        self.pool = BlockPool(limits.kv_blocks, limits.block_tokens, self._listener)
        if self._listener:
            self._listener.cleared()
        self.host = BlockPool(limits.host_blocks, limits.block_tokens)
        self.pending = PendingRequests()
        self._kv = KVManager(
            self.pool, self.host, self.counters, limits.prefix_sharing, limits.exact_swaps
        )
        self._reporter = Reporter(limits.report_every_steps)
        self._static = StaticBatching(self._kv, limits.reach_tokens)
        self._evictor = Evictor(self._kv, self._reporter, self._static)
        self.ends = RequestEnds(self._kv, self._static, self._reporter)
        self.steps = StepCycle(
            limits, self._kv, self._static, self._evictor, self.ends, self._reporter
        )
        self.runs = StepRuns(self.steps, self._kv, self._static, self._reporter)

    @contextmanager
    def without_drafts(self) -> Iterator[None]:
        """Within it, requests draft nothing, so that a step's time is that of its rows. Drops
        everything at both ends."""
        limits = self.limits
        self.limits = replace(limits, drafts=NO_DRAFTS)
        self.reset()
        try:
            yield
        finally:
            self.limits = limits
            self.reset()

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """All requests here. The last token of a request that the step in flight draws is
        unknown."""
        return self._kv.sequences

    @property
    def running(self) -> Mapping[str, Sequence]:
        """Requests that may run, in order of admission."""
        return self._kv.running

    @property
    def padding_tokens(self) -> int:
        """KV tokens of padding on the device. O(padded members)."""
        return sum(pad.computed for pad in self._kv.pads.values())

    @property
    def idle(self) -> bool:
        """No request is here or expected, and no step is in flight."""
        return not (self.sequences or self.steps.in_flight or self.pending)

    @property
    def busy(self) -> bool:
        """Whether requests run or are computed."""
        return bool(self.running or self.steps.in_flight)

    @property
    def awaited_since_s(self) -> list[float]:
        """When the requests without a prompt were admitted."""
        return [since_s for _, since_s in self.pending.admissions.values()]

    def attach(self) -> tuple[HeldRequest, ...]:
        """Attaches a scheduler. Returns all requests here, which it adopts by plans or cancels. The
        step in flight is not included; it is reported like any other.

        Plans and reports are numbered from 1. Prompts without an admission are kept without a
        budget. Static batches and expected cancels of the previous scheduler are dropped.
        """
        self.ends.expected_cancels.clear()
        self.ends.end_batches(self._static.dissolve())
        for prompt in self.pending.pop_prompts():
            self._kv.park(prompt)
        self.pool.cached.ask(0)
        blocks = self._kv.blocks()
        self._reporter.begin(self.sequences, blocks)
        return tuple(s.held(blocks.get(s.request_id, 0)) for s in self.sequences.values())

    def return_reports(self, reports: Collection[Report]) -> None:
        """Puts the ends and evictions of reports that were not sent into the next one. None of them
        contains the step in flight."""
        self._reporter.restore(reports, self._parked)

    def _parked(self, request_id: str) -> Sequence | None:
        sequence = self.sequences.get(request_id)
        return sequence if sequence and sequence.phase is SequencePhase.PARKED else None

    def keep_only(self, origins: Container[str]) -> None:
        """Drops requests of other gateway streams, because their tokens cannot be delivered."""
        here = [s.prompt for s in self.sequences.values()]
        for request_id in self.pending.of_other_origins(here, origins):
            self.ends.forget(request_id)
            self.pending.forget(request_id)

    # Prompts and plans

    def receive(self, prompt: Prompt, now: float) -> str | None:
        """Accepts a prompt, before or after the plan that admits it. Returns why it can never run
        here, in which case it is reported as an ERROR; else None. A request that is already here
        restarts after the delivered tokens of the prompt; a step in flight of its earlier placement
        has no effect on it."""
        request_id = prompt.request_id
        if request_id in self.sequences:
            # It was moved away and back before the cancel of its earlier placement arrived.
            self.ends.forget(request_id)
            self.ends.expected_cancels.expect(request_id)
        if why := self.limits.refusal(prompt):
            self.refuse(request_id)
            return why
        limit_tokens = self.pending.add_prompt(prompt, now)
        if limit_tokens is not None:
            self._kv.start(prompt, limit_tokens)
            self._static.on_prompt(self.sequences[request_id])
        return None

    def apply_plan(self, plan: Plan, now: float) -> None:
        """Applies a plan. A plan with a seq that was applied before changes nothing.

        Budgets include the token in flight. A paused or offloaded request keeps the KV that the
        step in flight stores, and gets its token later. A new static batch begins after that step.
        """
        if plan.seq <= self._reporter.applied_plan_seq:
            return
        for request_id in plan.cancel:
            self.cancel(request_id)
        for pause in plan.pause:
            self._pause(pause)
        for grant in plan.admit:
            self._admit(grant, now)
        for grant in plan.extend:
            self._extend(grant)
        for request_id in plan.prefetch:
            self._evictor.prefetch(request_id)
        for batch in plan.batches:
            self._static.gather(batch, self.pending.admissions)
        if plan.prefix_blocks:
            self.pool.cached.ask(plan.prefix_blocks)
        self._evictor.apply_plan_order(plan)
        self._reporter.record_plan(plan.seq)

    def cancel(self, request_id: str) -> None:
        """Frees everything of a request, in flight or not; ignores an unknown one."""
        if self.ends.expected_cancels.pop(request_id):
            return
        self.ends.forget(request_id)
        self.pending.forget(request_id)

    def refuse(self, request_id: str) -> None:
        """Reports a request that cannot begin as an ERROR, and drops an earlier placement of it."""
        self.ends.forget(request_id)
        self.pending.forget(request_id)
        self._reporter.record_completion(request_id, 0, FinishReason.ERROR)

    def fail(self, sequence: Sequence) -> bool:
        """Ends a request of the step that is being computed with an ERROR; what the step draws for
        it does not count. False if it is gone already."""
        if not self._kv.is_here(sequence):
            return False
        if sequence.sampling_row >= 0:
            sequence.undo_advance()
        self.ends.finish(sequence, FinishReason.ERROR)
        return True

    def expire(self, now: float) -> None:
        """Drops prompts and admissions that waited too long for each other."""
        for request_id in self.pending.expire(now):
            self._static.remove_from_batch(request_id)
            self._reporter.record_completion(request_id, 0, FinishReason.ERROR)

    def report(self) -> Report | None:
        """What happened since the last report; None if nothing did. A token in flight does not
        count, but its blocks do."""
        return self._reporter.next_report(self._kv)

    def _admit(self, grant: Grant, now: float) -> None:
        sequence = self.sequences.get(grant.request_id)
        if sequence is None:
            prompt = self.pending.admit(grant.request_id, grant.limit_tokens, now)
            if prompt:
                self._kv.start(prompt, grant.limit_tokens)
            return
        if sequence.ended:
            return
        self._kv.set_limit(sequence, grant.limit_tokens)
        self._static.on_budget_changed(sequence)
        if sequence.phase is not SequencePhase.RUNNING:
            self._kv.run(sequence)
            self._reporter.forget(grant.request_id)  # its eviction is outdated

    def _extend(self, grant: Grant) -> None:
        self.pending.extend(grant.request_id, grant.limit_tokens)
        sequence = self.sequences.get(grant.request_id)
        if sequence is None or sequence.ended:
            return
        if sequence.prompt_tokens + grant.limit_tokens > sequence.limit_length:
            self._kv.set_limit(sequence, grant.limit_tokens)

    def _pause(self, pause: Pause) -> None:
        sequence = self.sequences.get(pause.request_id)
        if sequence is None or sequence.phase is SequencePhase.PARKED:
            return
        last = self._static.remove_from_batch(pause.request_id)
        if last:
            self.ends.end_late(sequence, last)
            return
        self._reporter.include(sequence)
        if pause.residency is not Residency.KEEP:
            self._kv.release_device(sequence, pause.residency)
        elif sequence.phase is SequencePhase.RUNNING:
            self._kv.pause(sequence)

    def pop_moves(self) -> TransferPlan:
        """The copies that must be issued before the composed step, in order."""
        return self._kv.pop_moves()

    def complete_uploads(self, serials: Iterable[int]) -> None:
        """Completes these uploads: their requests may be in the next step."""
        for serial in serials:
            self._kv.complete_upload(serial)

    def drop_lost_kv(self, request_ids: Iterable[str]) -> None:
        """Drops the KV of requests that host memory had no room for; it is recomputed."""
        for request_id in request_ids:
            if sequence := self._kv.drop_lost_kv(request_id):
                self._reporter.record_eviction(sequence)

    def record_swaps(self, timings: Collection[SwapTiming]) -> None:
        """Records completed transfers for the next report."""
        self._reporter.record_swaps(timings)

    def pop_late(self) -> list[NewToken]:
        """Last tokens of the requests of static batches that ended between two steps."""
        return self.ends.pop_late()

    def check_integrity(self) -> None:
        """All redundant state agrees. Raises AssertionError."""
        self._kv.check_integrity()
        self._static.check_integrity()
        self.steps.check_integrity()
        self.pending.check_integrity(self.sequences)

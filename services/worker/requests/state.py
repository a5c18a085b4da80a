"""WorkerState: the effects of plans, prompts and drawn tokens on a worker. Pure, without I/O.

The cycle: plans and prompts change the running requests (`apply_plan`, `receive`) → `compose` one
step → the engine computes it → `commit` its tokens, or `fail` → `report`. Schedulers come and go
(`attach`). Without one there are no plans and no reports, and requests continue within their
budgets.

One step may be in flight: `advance` marks it as launched, and the next one can be composed. Between
`compose` and `advance` (or `commit`, if nothing is composed ahead) the only permitted call commits
the step in flight; between `advance` and `commit` any call is permitted (see flight.py).
"""

from collections.abc import Collection, Container, Iterable, Mapping

from services.core import FinishReason, Grant, HeldRequest, Pause, Plan, Report, Residency
from services.costs import StepTiming, SwapTiming
from services.worker.kv.blocks import BlockPool
from services.worker.kv.transfers import TransferPlan
from services.worker.requests.batch import NewToken, StepBatch, StepResult, TokenLogprobs
from services.worker.requests.batching import Batching
from services.worker.requests.composer import Composer
from services.worker.requests.evictor import Evictor
from services.worker.requests.flight import InFlight
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.limits import Counters, Limits
from services.worker.requests.pending import HELD_MAX, PendingRequests
from services.worker.requests.prompt import Prompt
from services.worker.requests.reporting import Reporter
from services.worker.requests.scores import PromptLogprobs
from services.worker.requests.sequence import Phase, Sequence
from services.worker.requests.static_batching import Batch, StaticBatching
from services.worker.requests.suspects import Suspects


class WorkerState:
    """One model replica's requests, from plan and prompt to their end."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.counters = Counters()
        self.reset()

    def reset(self) -> None:
        """Drops everything; the step in flight has no effect."""
        limits = self.limits
        self.pool = BlockPool(limits.kv_blocks, limits.block_tokens)
        self.host = BlockPool(limits.host_blocks, limits.block_tokens)
        self.pending = PendingRequests()
        self._kv = KVManager(
            self.pool, self.host, self.counters, limits.prefix_sharing, limits.exact_swaps
        )
        self._reporter = Reporter(limits.report_every_steps)
        self._static = StaticBatching(self._kv, self.counters, limits.reach_tokens)
        self._evictor = Evictor(self._kv, self._reporter, self._static)
        self._suspects = Suspects()
        self._composer = Composer(self._kv, self._evictor, self._static, self._suspects, limits)
        self._owed_cancels: set[str] = set()
        self._flight = InFlight(self._kv)
        self._late: list[NewToken] = []  # last tokens to send, of static batches that are over

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """All requests here. The last token of one that draws in a step in flight is unknown."""
        return self._kv.sequences

    @property
    def running(self) -> Mapping[str, Sequence]:
        """Requests that may run, in order of admission."""
        return self._kv.running

    @property
    def idle(self) -> bool:
        """No request is here or expected, and no step is in flight."""
        return not (self.sequences or self._flight or self.pending)

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched and not committed."""
        return bool(self._flight)

    def attach(self) -> tuple[HeldRequest, ...]:
        """A scheduler attaches. Returns all requests here, which it adopts by plans or cancels. The
        step in flight is not included; it is reported like any other.

        Plans and reports are numbered from 1. Prompts without an admission are kept without a
        budget. Unfinished business of the previous scheduler is dropped, including static batches.
        """
        self._owed_cancels.clear()
        self._let_go(self._static.dissolve())
        for prompt in self.pending.take_prompts():
            self._kv.park(prompt)
        self.pool.cached.ask(0)
        blocks = self._kv.blocks()
        self._reporter.begin(self.sequences, blocks)
        return tuple(s.held(blocks.get(s.request_id, 0)) for s in self.sequences.values())

    def return_reports(self, reports: Iterable[Report]) -> None:
        """These reports were not sent: their ends and evictions go into the next one. The step in
        flight was in none of them."""
        unsent = list(reports)
        self._reporter.restore_finished(ended for report in unsent for ended in report.finished)
        for progress in (left for report in unsent for left in report.evicted):
            sequence = self.sequences.get(progress.request_id)
            if sequence and sequence.phase is Phase.PARKED:
                self._reporter.evicted(sequence)

    def keep_only(self, origins: Container[str]) -> None:
        """Drops requests of other gateway streams than these: their tokens cannot be delivered."""
        here = [s.prompt for s in self.sequences.values()]
        expected = [prompt for prompt, _ in self.pending.prompts.values()]
        for prompt in (*here, *expected):
            if prompt.origin not in origins:
                self._forget(prompt.request_id)
                self.pending.forget(prompt.request_id)

    # Prompts and plans

    def receive(self, prompt: Prompt, now: float) -> str | None:
        """Accepts a prompt, before or after the plan that admits it. Returns why it can never run
        here, in which case it is reported as an ERROR. A request that is here already restarts from
        the tokens that the prompt says were delivered; the step in flight of its earlier placement
        has no effect on it."""
        request_id = prompt.request_id
        if request_id in self.sequences:
            # Placed elsewhere and here again: the cancel of its earlier placement is still on its
            # way.
            self._forget(request_id)
            if len(self._owed_cancels) < HELD_MAX:
                self._owed_cancels.add(request_id)
        if why := self.limits.refusal(prompt):
            self.refuse(request_id)
            return why
        limit_tokens = self.pending.prompt(prompt, now)
        if limit_tokens is not None:
            self._kv.start(prompt, limit_tokens)
            self._static.came(self.sequences[request_id])
        return None

    def apply_plan(self, plan: Plan, now: float) -> None:
        """Applies a plan. A plan whose seq was applied before changes nothing.

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
        self._evictor.planned(plan)
        self._reporter.planned(plan.seq)

    def cancel(self, request_id: str) -> None:
        """Frees everything of a request, in flight or not; ignores an unknown one."""
        if request_id in self._owed_cancels:
            self._owed_cancels.remove(request_id)
            return
        self._forget(request_id)
        self.pending.forget(request_id)

    def refuse(self, request_id: str) -> None:
        """Reports a request that cannot begin as an ERROR; ends an earlier placement of it, too."""
        self._forget(request_id)
        self.pending.forget(request_id)
        self._reporter.finished(request_id, 0, FinishReason.ERROR)

    def fail(self, batch: StepBatch) -> list[Sequence]:
        """The step failed and has no effect, nor has a step launched after it. A request alone in
        it ends with ERROR and is returned. Several are computed in halves from now on, without
        their padding. A member that had ended computes no more, and its own end is sent when its
        static batch is over."""
        self._unwind()
        rows = [s for s in batch.sequences if self._kv.is_here(s)]
        self._kv.touch()
        for chunk in self._static.padding_in(batch.chunks):
            self._static.leave_out(chunk.sequence)
        if len(batch.sequences) > 1:  # one of them may have gone meanwhile
            self._suspects.split(rows)
            return []
        self._suspects.pass_part()
        for sequence in rows:
            if sequence.ended:
                self._static.stop(sequence)
            else:
                self._finish(sequence, FinishReason.ERROR)
        self._settle()
        return [s for s in rows if not s.ended]

    def out_of_memory(self, batch: StepBatch) -> bool:
        """The device has no memory for the step, which has no effect; one request is evicted. False
        if one was alone in it, which would need as much again."""
        self._unwind()
        rows = [s for s in batch.sequences if self.running.get(s.request_id) is s and not s.ended]
        self._kv.touch()
        return self._evictor.relieve(rows)

    def expire(self, now: float) -> None:
        """Drops prompts and admissions that waited too long for each other."""
        for request_id in self.pending.expire(now):
            self._static.leave(request_id)
            self._reporter.finished(request_id, 0, FinishReason.ERROR)

    def report(self) -> Report | None:
        """What happened since the last report, if the scheduler must know anything. A token in
        flight does not count, but its blocks do."""
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
        if sequence.phase is not Phase.RUNNING:
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
        if sequence is None or sequence.phase is Phase.PARKED:
            return
        last = self._static.leave(pause.request_id)
        if last:
            self._end_late(sequence, last)
            return
        self._reporter.include(sequence)
        if pause.residency is not Residency.KEEP:
            self._kv.leave(sequence, pause.residency)
        elif sequence.phase is Phase.RUNNING:
            self._kv.pause(sequence)

    def _forget(self, request_id: str) -> None:
        self._static.leave(request_id)
        self._kv.forget(request_id)
        self._reporter.forget(request_id)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._forget(sequence.request_id)
        self._owed_cancels.discard(sequence.request_id)
        self._reporter.finished(sequence.request_id, sequence.output_tokens, reason)

    def take_late(self) -> list[NewToken]:
        """Last tokens of requests whose static batch ended between two steps."""
        late, self._late = self._late, []
        return late

    def _settle(self) -> None:
        """Begins and ends static batches."""
        if self._static.active:
            self._let_go(self._static.settle())

    def _let_go(self, batches: Iterable[Batch]) -> None:
        """Sends the ends of members, and reports those that used up their budgets."""
        for batch in batches:
            for request_id, sequence in batch.members.items():
                if last := batch.last.get(request_id):
                    self._end_late(sequence, last)
                else:
                    self._reporter.include(sequence)

    def _end_late(self, sequence: Sequence, last: NewToken) -> None:
        assert sequence.ended, "it goes on"
        sequence.untold -= 1
        self._late.append(last)
        self._finish(sequence, sequence.ended)

    def take_moves(self) -> TransferPlan:
        """The copies that must be issued before the composed step, in order."""
        return self._kv.take_moves()

    def arrived(self, serials: Iterable[int]) -> None:
        """These uploads are complete. A request that waited for one may be in the next step."""
        for serial in serials:
            self._kv.arrived(serial)

    def lost(self, request_ids: Iterable[str]) -> None:
        """Host memory could not take these; they are recomputed once their tokens are known."""
        for request_id in request_ids:
            if sequence := self._kv.lost(request_id):
                self._reporter.evicted(sequence)

    def swapped(self, timings: Collection[SwapTiming]) -> None:
        self._reporter.swapped(timings)

    # One iteration

    def compose(self) -> StepBatch | None:
        """The next step with its memory, or None if nothing can run. After a step in flight, rows
        may read its tokens (`DecodeRows.fed`). None also if the step depends on the end of that
        one, as with exhausted memory and static batches: commit, then compose."""
        if self._flight:
            alone = not self._static.current.ends_known_ahead or self._suspects
            return None if alone else self._composer.compose(self._flight.batch)
        self._settle()
        batch = self._composer.compose()
        if batch is None:
            self._settle()  # an evicted request may have been the last that its batch waited for
        return batch

    def withdraw(self) -> None:
        """The last composed step was not launched: compose another, so that kernels start
        afresh."""
        self._kv.touch()

    def advance(self, batch: StepBatch) -> None:
        """The last composed step was launched: continues as if it were computed. O(rows)."""
        used_up = self._flight.launch(batch)
        if used_up and self._static.current.ends_known_ahead:
            self._kv.touch()
        self._composer.advanced(batch)

    def commit(
        self,
        batch: StepBatch,
        sampled: list[int],
        timings: list[StepTiming],
        logprobs: Mapping[int, TokenLogprobs] | None = None,
        scores: Iterable[PromptLogprobs] = (),
    ) -> StepResult:
        """Stores the drawn tokens, one for each of `batch.sampling`; `logprobs` by index; `scores`,
        one for each of `batch.scored`. `timings` are of steps whose time is known by now. Returns
        what is sent: no invalid tokens, none of requests that left during the step, and the last
        tokens of static batches only once these are over."""
        if not self._flight:
            self.advance(batch)
        self._flight.land(batch, scores)
        batching = self._static.current
        self._kv.publish_all(batch.chunks)
        rows = zip(range(len(sampled)), batch.sampling, sampled, strict=True)
        tokens = [
            self._take(batching, sequence, token, logprobs.get(row) if logprobs else None)
            for row, sequence, token in batching.accept_draws(rows)
            if sequence.drawing >= 0
        ]
        tokens = batching.release_tokens(batch.chunks, tokens)
        if not batching.ends_known_ahead:
            self._settle()
            tokens += self.take_late()
        if self._suspects:
            self._suspects.pass_part()
            self._kv.touch()
        self._composer.committed(batch, sampled)
        return StepResult(tokens, timings, self._reporter.stepped(timings))

    def _take(
        self, batching: Batching, sequence: Sequence, token: int, logprobs: TokenLogprobs | None
    ) -> NewToken:
        length = sequence.learn(token)
        if sequence.computed % self.limits.block_tokens == 0:
            self._kv.publish(sequence)
        finish = sequence.finish_of(token, self.limits.eos_ids)
        if finish:
            if not batching.end(sequence, finish):
                self._finish(sequence, finish)
        elif sequence.phase is not Phase.RUNNING or not sequence.within_budget:
            if not batching.on_budget_changed(sequence):
                self._reporter.include(sequence)
            if not batching.ends_known_ahead:
                self._kv.touch()
        prompt, offset = sequence.prompt, length - 1 - sequence.prompt_tokens
        opening = None if sequence.opened else sequence.open()
        return NewToken(prompt.origin, prompt.request_id, offset, token, finish, logprobs, opening)

    def _unwind(self) -> None:
        for sequence in self._flight.unwind():
            self._reporter.evicted(sequence)

    def check_integrity(self) -> None:
        """All redundant state agrees. Raises AssertionError."""
        self._kv.check_integrity()
        self._static.check_integrity()
        self._flight.check_integrity()
        self.pending.check_integrity(self.sequences)

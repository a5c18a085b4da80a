"""WorkerState: what plans, prompts and drawn tokens do to a worker. Pure, sans-I/O.

The cycle: plans and prompts change the running requests (`apply_plan`, `receive`) → `compose` one
step → the engine computes it → `commit` its tokens, or `fail` → `report`. Schedulers come and go
(`attach`). Without one there are no plans and no reports, and requests continue within their
budgets.

One step may be in flight: `advance` says that it was launched, and the next one can be composed.
Between `compose` and `advance` (or `commit`, where nothing is composed ahead) nothing is called but
to commit the step in flight; between `advance` and `commit` anything may come (see flight.py).
"""

from collections.abc import Collection, Container, Iterable, Mapping

from services.core import FinishReason, Grant, HeldRequest, Pause, Plan, Report, Residency
from services.costs import StepTiming, SwapTiming
from services.worker.kv.blocks import BlockPool
from services.worker.kv.moves import Moves
from services.worker.requests.batch import NewToken, StepBatch, StepResult, TokenLogprobs
from services.worker.requests.composer import Composer
from services.worker.requests.counters import Counters
from services.worker.requests.evictor import Evictor
from services.worker.requests.flight import InFlight
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.limits import Limits
from services.worker.requests.lockstep import Batch, Lockstep
from services.worker.requests.pending import HELD_MAX, PendingRequests
from services.worker.requests.prompt import Prompt
from services.worker.requests.reporting import Reporter
from services.worker.requests.scores import PromptLogprobs
from services.worker.requests.sequence import Phase, Sequence
from services.worker.requests.suspects import Suspects


class WorkerState:
    """One model replica's requests, from plan and prompt to their end."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.counters = Counters()
        self.reset()

    def reset(self) -> None:
        """Forget everything, as if nobody had ever been here; what is in flight is nobody's."""
        limits = self.limits
        self.pool = BlockPool(limits.kv_blocks, limits.block_tokens)
        self.host = BlockPool(limits.host_blocks, limits.block_tokens)
        self.pending = PendingRequests()
        self._kv = KVManager(
            self.pool, self.host, self.counters, limits.prefix_sharing, limits.exact_swaps
        )
        self._reporter = Reporter(limits.report_every_steps)
        self._lockstep = Lockstep(self._kv, self.counters, limits.reach_tokens)
        self._evictor = Evictor(self._kv, self._reporter, self._lockstep)
        self._suspects = Suspects()
        self._composer = Composer(self._kv, self._evictor, self._lockstep, self._suspects, limits)
        self._owed_cancels: set[str] = set()
        self._flight = InFlight(self._kv)
        self._late: list[NewToken] = []  # to be told, of batches that are over

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """Who is here. The last token of one that draws in a step in flight is unknown."""
        return self._kv.sequences

    @property
    def running(self) -> Mapping[str, Sequence]:
        """Those that may run, in order of admission."""
        return self._kv.running

    @property
    def idle(self) -> bool:
        """Nobody is here, nobody is expected, and nothing is computed."""
        return not (self.sequences or self._flight or self.pending)

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched that is not committed."""
        return bool(self._flight)

    # Schedulers

    def attach(self) -> tuple[HeldRequest, ...]:
        """A scheduler comes that may know nobody here. Returns all there are: it adopts them by
        its plans, or cancels them. What is in flight is not in it: it is told as any step's.

        Plans and reports are numbered from 1 on. Prompts not admitted yet are kept without a
        budget; what else the last scheduler left half done is forgotten, its static batches too.
        """
        self._owed_cancels.clear()
        self._let_go(self._lockstep.dissolve())
        for prompt in self.pending.take_prompts():
            self._kv.park(prompt)
        self.pool.cached.ask(0)
        blocks = self._kv.blocks()
        self._reporter.begin(self.sequences, blocks)
        return tuple(s.held(blocks.get(s.request_id, 0)) for s in self.sequences.values())

    def return_reports(self, reports: Iterable[Report]) -> None:
        """These were not sent: what they say of endings and evictions goes into the next. A step in
        flight has no part in it: nothing was reported of it."""
        unsent = list(reports)
        self._reporter.untold(ended for report in unsent for ended in report.finished)
        for progress in (left for report in unsent for left in report.evicted):
            sequence = self.sequences.get(progress.request_id)
            if sequence and sequence.phase is Phase.PARKED:
                self._reporter.evicted(sequence)

    def keep_only(self, origins: Container[str]) -> None:
        """Forget whoever came on another gateway stream than these: nobody reads its tokens."""
        here = [s.prompt for s in self.sequences.values()]
        expected = [prompt for prompt, _ in self.pending.prompts.values()]
        for prompt in (*here, *expected):
            if prompt.origin not in origins:
                self._forget(prompt.request_id)
                self.pending.forget(prompt.request_id)

    # Prompts and plans

    def receive(self, prompt: Prompt, now: float) -> str | None:
        """Take a prompt, before or after the plan that admits it. Returns why it can never run
        here, if so; it is then reported as an ERROR. One that is here already begins anew from the
        tokens that it says were delivered: what its first stay has in flight is not for it.
        """
        request_id = prompt.request_id
        if request_id in self.sequences:
            # Placed elsewhere, and here again: the cancel of its first stay is still on its way.
            self._forget(request_id)
            if len(self._owed_cancels) < HELD_MAX:
                self._owed_cancels.add(request_id)
        if why := self.limits.refusal(prompt):
            self.refuse(request_id)
            return why
        limit_tokens = self.pending.prompt(prompt, now)
        if limit_tokens is not None:
            self._kv.start(prompt, limit_tokens)
            self._lockstep.came(self.sequences[request_id])
        return None

    def apply_plan(self, plan: Plan, now: float) -> None:
        """Carry out a plan; one whose seq was applied before changes nothing.

        Budgets count the token in flight. Who is paused or offloaded takes along what that step
        stores of it, and gets its token later. A new static batch begins behind that step.
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
            self._lockstep.gather(batch, self.pending.admissions)
        if plan.prefix_blocks:
            self.pool.cached.ask(plan.prefix_blocks)
        self._evictor.planned(plan)
        self._reporter.planned(plan.seq)

    def cancel(self, request_id: str) -> None:
        """Free everything of a request, in flight or not; an unknown one is fine."""
        if request_id in self._owed_cancels:
            self._owed_cancels.remove(request_id)
            return
        self._forget(request_id)
        self.pending.forget(request_id)

    def refuse(self, request_id: str) -> None:
        """Report a request that cannot begin as an ERROR; an earlier stay of it ends, too."""
        self._forget(request_id)
        self.pending.forget(request_id)
        self._reporter.finished(request_id, 0, FinishReason.ERROR)

    def fail(self, batch: StepBatch) -> list[Sequence]:
        """The step broke, and nothing of it counts, in flight or not. Who stood alone in it ends as
        ERROR, and is returned; several are tried in halves from now on, without their padding. One
        that had ended before computes no more, and is told its own end when its static batch is
        over. Nor does anything count that was launched behind it."""
        self._unwind()
        rows = [s for s in batch.sequences if self._kv.is_here(s)]
        self._kv.touch()
        for chunk in self._lockstep.padding_in(batch.chunks):
            self._lockstep.leave_out(chunk.sequence)
        if len(batch.sequences) > 1:  # one of them may have gone since
            self._suspects.split(rows)
            return []
        self._suspects.pass_part()
        for sequence in rows:
            if sequence.ended:
                self._lockstep.stop(sequence)
            else:
                self._finish(sequence, FinishReason.ERROR)
        self._settle()
        return [s for s in rows if not s.ended]

    def out_of_memory(self, batch: StepBatch) -> bool:
        """The device has no memory to compute it in, and nothing of it counts, in flight or not;
        somebody gives way. False where one stood alone, who would need as much again."""
        self._unwind()
        rows = [s for s in batch.sequences if self.running.get(s.request_id) is s and not s.ended]
        self._kv.touch()
        return self._evictor.relieve(rows)

    def expire(self, now: float) -> None:
        """Give up on halves that waited too long for their other half."""
        for request_id in self.pending.expire(now):
            self._lockstep.leave(request_id)
            self._reporter.finished(request_id, 0, FinishReason.ERROR)

    def report(self) -> Report | None:
        """What happened since the last report, if anything that the scheduler must know. A token in
        flight is not counted, the blocks that it takes are."""
        return self._reporter.take(self._kv)

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
        self._lockstep.rebudgeted(sequence)
        if sequence.phase is not Phase.RUNNING:
            self._kv.run(sequence)
            self._reporter.forget(grant.request_id)  # that it had left is no news any more

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
        last = self._lockstep.leave(pause.request_id)
        if last:
            self._end_late(sequence, last)
            return
        self._reporter.tell(sequence)
        if pause.residency is not Residency.KEEP:
            self._kv.leave(sequence, pause.residency)
        elif sequence.phase is Phase.RUNNING:
            self._kv.pause(sequence)

    def _forget(self, request_id: str) -> None:
        self._lockstep.leave(request_id)
        self._kv.forget(request_id)
        self._reporter.forget(request_id)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._forget(sequence.request_id)
        self._owed_cancels.discard(sequence.request_id)
        self._reporter.finished(sequence.request_id, sequence.output_tokens, reason)

    # Static batches

    def take_late(self) -> list[NewToken]:
        """Last tokens of requests whose static batch was over between two steps."""
        late, self._late = self._late, []
        return late

    def _settle(self) -> None:
        """Static batches begin and end."""
        if self._lockstep.active:
            self._let_go(self._lockstep.settle())

    def _let_go(self, batches: Iterable[Batch]) -> None:
        """Tell how their members have ended, or that they have used up their budgets."""
        for batch in batches:
            for request_id, sequence in batch.members.items():
                if last := batch.last.get(request_id):
                    self._end_late(sequence, last)
                else:
                    self._reporter.tell(sequence)

    def _end_late(self, sequence: Sequence, last: NewToken) -> None:
        assert sequence.ended, "it goes on"
        sequence.untold -= 1
        self._late.append(last)
        self._finish(sequence, sequence.ended)

    # Copies between the pools

    def take_moves(self) -> Moves:
        """What must be copied before the composed step is computed, in order."""
        return self._kv.take_moves()

    def arrived(self, serials: Iterable[int]) -> None:
        """These uploads are over. Who left behind a step in flight may stand in the next one."""
        for serial in serials:
            self._kv.arrived(serial)

    def lost(self, request_ids: Iterable[str]) -> None:
        """Host memory could not take these; they are computed again once their tokens are known."""
        for request_id in request_ids:
            if sequence := self._kv.lost(request_id):
                self._reporter.evicted(sequence)

    def swapped(self, timings: Collection[SwapTiming]) -> None:
        self._reporter.swapped(timings)

    # One iteration

    def compose(self) -> StepBatch | None:
        """The next step with its memory, or None when nothing can run. Behind a step in flight rows
        may read what that draws (`DecodeRows.fed`); None, too, where it depends on how that one
        ends, as it does where memory is out and with static batches: commit, then compose.
        """
        if self._flight:
            alone = self._lockstep.active or self._suspects
            return None if alone else self._composer.compose(self._flight.batch)
        self._settle()
        batch = self._composer.compose()
        if batch is None:
            self._settle()  # who was evicted may have been the last that its batch waited for
        return batch

    def withdraw(self) -> None:
        """The step composed last was not launched: compose another, for kernels to begin anew."""
        self._kv.touch()

    def advance(self, batch: StepBatch) -> None:
        """The step composed last was launched: go on as if it were computed. O(rows)."""
        used_up = self._flight.launch(batch)
        if used_up and not self._lockstep.active:  # who ends there may go on with its batch
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
        """Take the tokens drawn, one for each of `batch.sampling`; `logprobs` by its index; and
        `scores`, one for each of `batch.scored`. `timings` are of steps whose time is known by now.
        What it returns is to be told: no invalid tokens, nor those of who has gone while the step
        was in flight, and the last ones of static batches only once these are over."""
        if not self._flight:
            self.advance(batch)
        self._flight.land(batch, scores)
        in_batches = self._lockstep.active
        self._kv.publish_all(batch.chunks)
        rows = zip(range(len(sampled)), batch.sampling, sampled, strict=True)
        tokens = [
            self._take(sequence, token, logprobs.get(row) if logprobs else None)
            for row, sequence, token in (self._lockstep.discard(rows) if in_batches else rows)
            if sequence.drawing >= 0
        ]
        if in_batches:
            self._lockstep.paid(batch.chunks)
            tokens = self._lockstep.withhold(tokens)
            self._settle()
            tokens += self.take_late()
        if self._suspects:
            self._suspects.pass_part()
            self._kv.touch()
        self._composer.committed(batch, sampled)
        return StepResult(tokens, timings, self._reporter.stepped(timings))

    def _take(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> NewToken:
        length = sequence.learn(token)
        if sequence.computed % self.limits.block_tokens == 0:
            self._kv.publish(sequence)
        finish = sequence.finish_of(token, self.limits.eos_ids)
        if finish:
            if not self._lockstep.end(sequence, finish):
                self._finish(sequence, finish)
        elif sequence.phase is not Phase.RUNNING or not sequence.within_budget:
            if not self._lockstep.rebudgeted(sequence):
                self._reporter.tell(sequence)
            if self._lockstep.active:  # else it was known ahead
                self._kv.touch()
        prompt, offset = sequence.prompt, length - 1 - sequence.prompt_tokens
        opening = None if sequence.opened else sequence.open()
        return NewToken(prompt.origin, prompt.request_id, offset, token, finish, logprobs, opening)

    def _unwind(self) -> None:
        for sequence in self._flight.unwind():
            self._reporter.evicted(sequence)

    def check_integrity(self) -> None:
        """All that is kept twice agrees. Raises AssertionError."""
        self._kv.check_integrity()
        self._lockstep.check_integrity()
        self._flight.check_integrity()
        self.pending.check_integrity(self.sequences)

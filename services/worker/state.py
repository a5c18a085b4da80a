"""WorkerState: what runs in the next iteration, and who holds which block. Pure, sans-I/O.

The loop: plans and prompts change who runs (`apply`, `receive`) → `compose` one step → the engine
computes it → `commit` what it drew → `report`. Between a `compose` and its `commit` nothing else
is called.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from services.core import FinishReason, Grant, Pause, Plan, Report, Residency, StepTiming
from services.worker.batch import (
    Chunk,
    DecodeRows,
    NewToken,
    StepBatch,
    StepResult,
    TokenLogprobs,
)
from services.worker.blocks import BlockPool
from services.worker.matching import HELD_MAX, Matching
from services.worker.prompt import Prompt
from services.worker.reporting import Reporter
from services.worker.sequence import Phase, Sequence


@dataclass(frozen=True)
class Limits:
    """The worker's shape. `kv_blocks * block_tokens` is all the KV there is."""

    kv_blocks: int
    block_tokens: int = 16
    max_running: int = 256
    max_batch_tokens: int = 512
    max_context_tokens: int = 2**31
    report_every_steps: int = 16
    eos_ids: frozenset[int] = field(default_factory=frozenset)

    @property
    def reach_tokens(self) -> int:
        """The longest prompt + output one request can have here."""
        return min(self.kv_blocks * self.block_tokens, self.max_context_tokens)


class WorkerState:
    """Owns all sequences and blocks of one model replica."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.reset()

    def reset(self) -> None:
        """Forget everything: a scheduler that we attach to (again) requeues what was here."""
        self.pool = BlockPool(self.limits.kv_blocks, self.limits.block_tokens)
        self.sequences: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}  # phase RUNNING, in order of admission
        self.matching = Matching()
        self._reporter = Reporter(self.limits.report_every_steps)
        self._victims: tuple[str, ...] = ()
        self._owed_cancels: set[str] = set()
        self._serial = 0
        self._steady: StepBatch | None = None  # the last batch, moved on, if nothing changed
        self._needy = np.zeros(0, np.int64)  # its rows that need one more block

    @property
    def idle(self) -> bool:
        """Nobody is here, and nobody is expected."""
        return not (self.sequences or self.matching.prompts or self.matching.admissions)

    # Prompts and plans

    def receive(self, prompt: Prompt, now: float) -> str | None:
        """Take a prompt, before or after the plan that admits it.

        Returns why it can never run here, if so; it is then reported as an ERROR.
        """
        request_id = prompt.request_id
        if request_id in self.sequences:
            # Placed elsewhere, and here again: the cancel of its first stay is still on its way.
            self._forget(request_id)
            if len(self._owed_cancels) < HELD_MAX:
                self._owed_cancels.add(request_id)
        if prompt.total_tokens > self.limits.reach_tokens:
            self.refuse(request_id)
            return (
                f"prompt ({prompt.prompt_tokens}) + max_tokens ({prompt.max_tokens}) is over the "
                f"{self.limits.reach_tokens} tokens that one request can have on this worker"
            )
        limit_tokens = self.matching.prompt(prompt, now)
        if limit_tokens is not None:
            self._start(prompt, limit_tokens)
        return None

    def apply(self, plan: Plan, now: float) -> None:
        """Carry out a plan; one whose seq was applied before changes nothing."""
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
        self._victims = plan.victims
        self._reporter.planned(plan.seq)

    def cancel(self, request_id: str) -> None:
        """Free everything of a request; an unknown one is fine."""
        if request_id in self._owed_cancels:
            self._owed_cancels.remove(request_id)
            return
        self._forget(request_id)
        self.matching.forget(request_id)

    def refuse(self, request_id: str) -> None:
        """Report a request that cannot begin as an ERROR."""
        self._forget(request_id)
        self.matching.forget(request_id)
        self._reporter.finished(request_id, 0, FinishReason.ERROR)

    def fail(self, sequences: list[Sequence]) -> None:
        """End these as ERROR, after their step went wrong."""
        for sequence in sequences:
            self._finish(sequence, FinishReason.ERROR)

    def expire(self, now: float) -> None:
        """Give up on halves that waited too long for their other half."""
        for request_id in self.matching.expire(now):
            self._reporter.finished(request_id, 0, FinishReason.ERROR)

    def report(self) -> Report | None:
        """What happened since the last report, if anything that the scheduler must know."""
        return self._reporter.take(self.running.values(), self.pool.free_tokens)

    def _admit(self, grant: Grant, now: float) -> None:
        sequence = self.sequences.get(grant.request_id)
        if sequence is None:
            prompt = self.matching.admit(grant.request_id, grant.limit_tokens, now)
            if prompt:
                self._start(prompt, grant.limit_tokens)
            return
        sequence.limit_length = sequence.prompt_tokens + grant.limit_tokens
        self._steady = None
        if sequence.phase is not Phase.RUNNING:
            self._run(sequence)

    def _start(self, prompt: Prompt, limit_tokens: int) -> None:
        sequence = Sequence.start(prompt, limit_tokens)
        self.sequences[prompt.request_id] = sequence
        self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        self._serial += 1
        sequence.serial = self._serial
        sequence.phase = Phase.RUNNING
        self.running[sequence.request_id] = sequence
        self._steady = None

    def _extend(self, grant: Grant) -> None:
        self.matching.extend(grant.request_id, grant.limit_tokens)
        sequence = self.sequences.get(grant.request_id)
        if sequence:
            limit_length = sequence.prompt_tokens + grant.limit_tokens
            if not sequence.within_budget:
                self._steady = None
            sequence.limit_length = max(sequence.limit_length, limit_length)

    def _pause(self, pause: Pause) -> None:
        sequence = self.running.pop(pause.request_id, None)
        if sequence is None:
            return
        self._steady = None
        if pause.residency is Residency.KEEP:
            sequence.phase = Phase.PAUSED
        else:  # there is no host memory yet to offload to: recomputed when admitted again
            self._park(sequence)

    def _park(self, sequence: Sequence) -> None:
        """Take its blocks; its tokens stay."""
        self.running.pop(sequence.request_id, None)
        self.pool.release(sequence.request_id)
        sequence.computed = 0
        sequence.phase = Phase.PARKED
        self._steady = None

    def _forget(self, request_id: str) -> None:
        if self.sequences.pop(request_id, None):
            self.running.pop(request_id, None)
            self.pool.release(request_id)
            self._reporter.forget(request_id)
            self._steady = None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._forget(sequence.request_id)
        self._owed_cancels.discard(sequence.request_id)
        self._reporter.finished(sequence.request_id, sequence.output_tokens, reason)

    # One iteration

    def compose(self) -> StepBatch | None:
        """The next step with its memory, or None when nothing can run.

        All decodes that fit come first, then prefill chunks up to `max_batch_tokens`. When memory
        is out, a decode evicts anybody; a prefill evicts only those admitted after it, so that
        the eldest always gets on. O(1) Python work while the same sequences decode.
        """
        if self._steady and self._grow_rows(self._steady.decodes):
            return self._steady
        self._steady = None
        runnable = [s for s in islice(self.running.values(), self.limits.max_running)
                    if s.within_budget]  # fmt: skip
        decodes = self._compose_decodes([s for s in runnable if s.is_decode])
        room = self.limits.max_batch_tokens - len(decodes)
        chunks = self._compose_chunks([s for s in runnable if not s.is_decode], room)
        decodes = [s for s in decodes if s.phase is Phase.RUNNING]  # not evicted since
        if not decodes and not chunks:
            return None
        tables = [self.pool.table(s.request_id) for s in decodes]
        return StepBatch(DecodeRows(decodes, tables, self.limits.block_tokens), chunks)

    def _grow_rows(self, rows: DecodeRows) -> bool:
        """Give each row that begins a block that block; False when memory is out."""
        for row in self._needy.tolist():
            sequence = rows.sequences[row]
            if not self.pool.grow(sequence.request_id, len(sequence.tokens)):
                return False
            rows.set_block(row, self.pool.table(sequence.request_id)[-1])
        return True

    def _compose_decodes(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those that get room; one may evict another that was given room before it."""
        first = sequences[: self.limits.max_batch_tokens]
        placed = [s for s in first if s.phase is Phase.RUNNING and self._make_room(s)]
        return [s for s in placed if s.phase is Phase.RUNNING]

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for a decode, evicting as needed; False when the victim was itself."""
        while not self.pool.grow(sequence.request_id, len(sequence.tokens)):
            victim = next(self._victims_for(sequence, decoding=True))
            self._evict(victim)
            if victim is sequence:
                return False
        return True

    def _compose_chunks(self, sequences: list[Sequence], room: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in sequences:
            if room <= 0 or sequence.phase is not Phase.RUNNING:
                continue
            end = self._reachable(sequence, sequence.computed + room)
            if end <= sequence.computed:
                break  # those behind it must not take what it waits for
            self.pool.grow(sequence.request_id, end)
            table = np.array(self.pool.table(sequence.request_id), np.int64)
            chunks.append(Chunk(sequence, sequence.computed, end, table))
            room -= chunks[-1].tokens
        return chunks

    def _reachable(self, sequence: Sequence, end: int) -> int:
        """How far a prefill gets, evicting those behind it as needed."""
        end = min(end, len(sequence.tokens))
        while end > self.pool.reach(sequence.request_id):
            victim = next(self._victims_for(sequence, decoding=False), None)
            if victim is None:
                return self.pool.reach(sequence.request_id)
            self._evict(victim)
        return end

    def _victims_for(self, sequence: Sequence, decoding: bool) -> Iterator[Sequence]:
        """Who may be evicted for it: as the plan orders, then paused, then newest, first."""
        for holder in self._eviction_order():
            behind = holder.phase is Phase.PAUSED or holder.serial > sequence.serial
            if self.pool.table(holder.request_id) and (decoding or behind):
                yield holder

    def _eviction_order(self) -> Iterator[Sequence]:
        for request_id in self._victims:
            if request_id in self.sequences:
                yield self.sequences[request_id]
        newest_first = sorted(self.sequences.values(), key=lambda s: -s.serial)
        yield from (s for s in newest_first if s.phase is Phase.PAUSED)
        yield from (s for s in newest_first if s.phase is Phase.RUNNING)

    def _evict(self, sequence: Sequence) -> None:
        self._park(sequence)
        self._reporter.evicted(sequence)

    def commit(
        self,
        batch: StepBatch,
        sampled: list[int],
        elapsed_s: float,
        logprobs: Mapping[int, TokenLogprobs] | None = None,
    ) -> StepResult:
        """Take the tokens drawn, one for each of `batch.sampling`; `logprobs` by its index."""
        timing = StepTiming(
            batch.prefill_tokens, len(batch.decodes), batch.context_tokens, elapsed_s
        )
        self._reporter.stepped(timing)
        self._steady = batch
        if batch.chunks:
            self._steady = None
            for chunk in batch.chunks:
                chunk.sequence.computed = chunk.end
        tokens = [
            self._take(sequence, token, logprobs.get(row) if logprobs else None)
            for row, (sequence, token) in enumerate(zip(batch.sampling, sampled, strict=True))
        ]
        if self._steady:
            self._needy = batch.decodes.advance(sampled)
        return StepResult(tokens, timing)

    def _take(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> NewToken:
        sequence.computed = length = len(sequence.tokens)
        sequence.tokens.append(token)
        offset = length - sequence.prompt_tokens
        finish = self._finish_of(sequence, token)
        if finish:
            self._finish(sequence, finish)
        elif not sequence.within_budget:
            self._reporter.slice_ended(sequence)
            self._steady = None
        return NewToken(
            sequence.prompt.origin, sequence.request_id, offset, token, finish, logprobs
        )

    def _finish_of(self, sequence: Sequence, token: int) -> FinishReason | None:
        length = len(sequence.tokens)
        if token in self.limits.eos_ids and sequence.ends_on_eos and length > sequence.min_length:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= sequence.max_length else None

    def check_integrity(self) -> None:
        """Blocks, phases and the kept batch agree with each other. Raises AssertionError."""
        self.pool.check_integrity()
        holders = {k for k, s in self.sequences.items() if s.phase is not Phase.PARKED}
        assert set(self.pool.owners()) <= holders, "blocks of a request that is not here"
        serials = [s.serial for s in self.running.values()]
        assert serials == sorted(serials), "running is not in order of admission"
        for request_id, sequence in self.sequences.items():
            assert (sequence.phase is Phase.RUNNING) == (request_id in self.running)
            assert 0 <= sequence.computed < len(sequence.tokens) < sequence.max_length
            room = len(self.pool.table(request_id)) * self.limits.block_tokens
            assert sequence.computed <= room < sequence.computed + 2 * self._chunk_room()
        assert not set(self.matching.prompts) & set(self.matching.admissions)

    def _chunk_room(self) -> int:
        return self.limits.max_batch_tokens + self.limits.block_tokens

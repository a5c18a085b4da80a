"""Composer: which tokens run in the next iteration, and the memory they need."""

from collections.abc import Iterable
from itertools import islice

import numpy as np

from services.worker.requests.batch import DecodeRows, PrefillChunk, StepBatch
from services.worker.requests.evictor import Evictor
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.limits import Limits
from services.worker.requests.lockstep import Lockstep
from services.worker.requests.sequence import Phase, Sequence
from services.worker.requests.suspects import Suspects


class Composer:
    """Decodes first, then prefill chunks up to `max_batch_tokens`, in order of admission.

    When memory is out, a decode evicts anybody; a prefill or the return of KV from host memory
    evicts only those behind it, so that the eldest always gets on. Where nobody may be evicted
    (residency defer) a decode waits; if all wait, one gives way. While the same sequences
    decode, the last batch is moved on by one token instead of composing another: a step then
    costs only its new blocks. Where there are static batches, `lockstep` says who may run, and
    padding comes behind all other prefill.

    Of prompts that begin alike (the choices of one request) the eldest prefills, and the others
    wait a step for its blocks. Where a step has failed, `suspects` says what part is tried next.

    Behind a step in flight nobody is evicted and nobody gives way: what that step ends frees
    memory, too. Where somebody would have to, there is no next step before that one is committed.
    """

    def __init__(
        self,
        kv: KVManager,
        evictor: Evictor,
        lockstep: Lockstep,
        suspects: Suspects,
        limits: Limits,
    ):
        self._kv = kv
        self._evictor = evictor
        self._lockstep = lockstep
        self._suspects = suspects
        self._pool = kv.pool
        self._max_running = limits.max_running
        self._max_batch_tokens = limits.max_batch_tokens
        self._max_scored_tokens = limits.max_scored_tokens
        self._steady: StepBatch | None = None  # the last batch, moved on
        self._needy = np.zeros(0, np.int64)  # its rows that need one more block
        self._version = 0  # of the kv, before it was composed
        self._ahead_of: StepBatch | None = None  # the step in flight
        self._must_wait = False  # for that, as somebody would have to leave
        self._left_waiting = False  # for that somebody who is in no batch

    def compose(self, ahead_of: StepBatch | None = None) -> StepBatch | None:
        """The next step with its memory, or None when nothing can run; nothing can before the
        step `ahead_of` it is committed, where there is one."""
        if (
            self._steady
            and self._version == self._kv.version
            and self._grow_rows(self._steady.decodes)
        ):
            return self._steady
        self._steady = None
        self._ahead_of = ahead_of
        self._left_waiting = False
        self._version = self._kv.version  # who leaves for this one may leave a place to another
        return self._compose_ahead() if ahead_of else self._compose_surely()

    def advanced(self, batch: StepBatch) -> None:
        """Move the batch on, if the next one can be the same: nobody came or went, and nobody waits
        for what is known once the step before it is committed."""
        same = not self._left_waiting and self._version == self._kv.version
        if same and not batch.chunks:
            self._steady = batch
            self._needy = batch.decodes.advance()

    def committed(self, batch: StepBatch, sampled: list[int]) -> None:
        """Its rows, moved on, may read what they drew from the host again."""
        if batch is self._steady:
            batch.decodes.learn(sampled)

    def _compose_ahead(self) -> StepBatch | None:
        """Of those whose next token does not depend on what the step in flight draws, or can read
        it on the device."""
        self._must_wait = False
        self._left_waiting = any(s.waits for s in self._kv.running.values())
        batch = self._compose()
        return None if self._must_wait else batch

    def _compose_surely(self) -> StepBatch | None:
        """Whatever has to be given up for it."""
        batch = self._compose()
        while batch is None and self._suspects:  # of this part nobody can run
            self._suspects.pass_part()
            batch = self._compose()
        if batch is None and self._lockstep.active and self._lockstep.hurry():
            batch = self._compose()
        while batch is None and self._runnable() and self._evictor.give_way():
            batch = self._compose()
        return batch

    def _compose(self) -> StepBatch | None:
        if self._lockstep.active:
            self._lockstep.advance()
        runnable = self._runnable()
        decodes = self._compose_decodes([s for s in runnable if s.is_decode])
        room = self._max_batch_tokens - len(decodes)
        chunks = self._compose_chunks([s for s in runnable if not s.is_decode], room)
        decodes = [s for s in decodes if _may_run(s)]  # not evicted since
        if not decodes and not chunks:
            return None
        tables = [self._pool.table(s.request_id) for s in decodes]
        return StepBatch(DecodeRows(decodes, tables, self._pool.block_tokens), chunks)

    def _runnable(self) -> list[Sequence]:
        """Those that the next step may run, memory permitting."""
        running = self._kv.running.values()
        if self._lockstep.active:
            runnable = self._lockstep.runnable(running, self._max_running)
        else:
            first = islice(running, self._max_running)
            runnable = [s for s in first if s.within_budget and not s.arriving and not s.waits]
        return self._suspects.narrow(runnable)

    def _grow_rows(self, rows: DecodeRows) -> bool:
        """Give each row that begins a block that block; False when memory is out."""
        for row in self._needy.tolist():
            sequence = rows.sequences[row]
            if not self._pool.grow(sequence.request_id, len(sequence.tokens)):
                return False
            rows.set_block(row, self._pool.table(sequence.request_id)[-1])
        return True

    def _compose_decodes(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those that get room; one may evict another that was given room before it."""
        first = sequences[: self._max_batch_tokens]
        placed = [s for s in first if _may_run(s) and self._make_room(s)]
        return [s for s in placed if _may_run(s)]

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for a decode, evicting as needed; False when the victim was itself. For a token
        that nobody reads, nobody leaves."""
        while not self._pool.grow(sequence.request_id, len(sequence.tokens)):
            if sequence.ended:
                return False
            if self._ahead_of:
                self._must_wait = True
                return False
            if self._lockstep.active and self._lockstep.give_way():
                continue
            victim = next(self._evictor.victims_for(sequence, decoding=True))
            if not self._evictor.evict(victim) or victim is sequence:
                return False
        return True

    def _compose_chunks(self, sequences: list[Sequence], room: int) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        to_score = self._max_scored_tokens
        for sequence in sequences:
            if not _may_run(sequence):
                continue
            if sequence.resting:
                if not self._bring_back(sequence):
                    return chunks
                continue
            most = room if sequence.scores is None else min(room, to_score)
            if most <= 0:
                continue
            if self._can_wait(sequence, chunks):
                continue
            self._kv.adopt_prefix(sequence)
            end = self._reachable(sequence, sequence.computed + most)
            if end <= sequence.computed:
                return chunks  # those behind it must not take what it waits for
            self._pool.grow(sequence.request_id, end)
            table = np.array(self._pool.table(sequence.request_id), np.int64)
            chunks.append(PrefillChunk(sequence, sequence.computed, end, table))
            room -= chunks[-1].tokens
            to_score -= chunks[-1].scored
        pads = self._lockstep.active and not self._suspects
        return chunks + self._lockstep.pad_chunks(room) if pads else chunks

    def _can_wait(self, sequence: Sequence, chunks: list[PrefillChunk]) -> bool:
        """Whether another is computing what it begins with, in this step or in the one in flight,
        which publishes nothing before it is committed."""
        landing = self._ahead_of.chunks if self._ahead_of else ()
        if not chunks and not landing:
            return False
        waits = self._kv.can_wait(sequence, _of(chunks), _of(landing))
        self._left_waiting |= waits
        return waits

    def _bring_back(self, sequence: Sequence) -> bool:
        """Begin the return of its KV, evicting those behind it as needed."""
        length = len(sequence.tokens)
        return self._reachable(sequence, length) == length and self._kv.bring_back(sequence)

    def _reachable(self, sequence: Sequence, end: int) -> int:
        """How far a prefill gets, evicting those behind it as needed."""
        end = min(end, len(sequence.tokens))
        while end > self._pool.reach(sequence.request_id):
            if self._lockstep.active and self._lockstep.give_way():
                continue
            victim = next(self._evictor.victims_for(sequence, decoding=False), None)
            if victim is None or not self._evictor.may_leave(victim):
                return self._pool.reach(sequence.request_id)
            if self._ahead_of:
                self._must_wait = True
                return self._pool.reach(sequence.request_id)
            self._evictor.evict(victim)
        return end


def _may_run(sequence: Sequence) -> bool:
    """It was not evicted since, nor stopped as one that has ended."""
    return sequence.phase is Phase.RUNNING and sequence.within_budget


def _of(chunks: Iterable[PrefillChunk]) -> Iterable[Sequence]:
    return (chunk.sequence for chunk in chunks)

"""Composer: selects the tokens of the next step, and allocates their memory."""

from collections.abc import Iterable

import numpy as np

from services.worker.requests.adapter_slots import AdapterSlots
from services.worker.requests.evictor import Evictor
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.speculation import Speculation
from services.worker.requests.static_batching import StaticBatching
from services.worker.requests.suspects import Suspects
from services.worker.requests.types.batch import DecodeRows, PrefillChunk, StepBatch
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.sequence import Sequence, SequencePhase


class Composer:
    """Decodes first, then prefill chunks up to `max_batch_tokens`, in order of admission.

    When memory runs out, a decode may evict any request. A prefill, or the return of KV from host
    memory, evicts only later requests, so that the oldest one always progresses. If the residency
    policy allows no eviction (defer), a decode waits; if all wait, one is evicted. While the same
    sequences decode, the last batch advances by one token instead of being composed again: a step
    then costs only its new blocks. The batching in use decides which requests may run. Padding
    follows all other prefill. Drafts get what is left of a step's tokens and of blank blocks.

    A request waits while its adapter has no slot on the device (adapter_slots.py).

    If prompts have a common beginning, such as the choices of one request, the oldest prefills, and
    the others wait one step for its blocks. After a failed step, `suspects` selects the part that
    is computed next.

    While a step is in flight, nothing is evicted, because the end of that step frees memory, too. A
    step that needs an eviction is composed after that commit.
    """

    def __init__(
        self,
        kv: KVManager,
        evictor: Evictor,
        static: StaticBatching,
        suspects: Suspects,
        speculation: Speculation,
        adapter_slots: AdapterSlots,
        limits: Limits,
    ):
        self._kv = kv
        self._evictor = evictor
        self._static = static
        self._suspects = suspects
        self._speculation = speculation
        self._adapter_slots = adapter_slots
        self._pool = kv.pool
        self._max_running = limits.max_running
        self._max_batch_tokens = limits.max_batch_tokens
        self._max_scored_tokens = limits.max_scored_tokens
        self._steady: StepBatch | None = None  # the last batch, if it was advanced
        self._needy = np.zeros(0, np.int64)  # rows of `_steady` that need another block
        self._version = 0  # of the KV state, before composition
        self._ahead_of: StepBatch | None = None  # the step in flight
        self._must_wait = False  # an eviction is needed, which has to wait for it
        self._left_waiting = False  # a request outside the batch waits for it

    def compose(self, ahead_of: StepBatch | None = None) -> StepBatch | None:
        """The next step with its memory. None if nothing can run, or nothing can run before the
        step in flight, `ahead_of`, is committed."""
        self._ahead_of = ahead_of
        if self._adapter_slots.begin_step():
            self._kv.bump_version()
        if (
            self._steady
            and self._version == self._kv.version
            and not (self._may_draft and self._speculation.find(self._steady.decodes.sequences))
            and self._grow_rows(self._steady.decodes)
        ):
            return self._steady
        self._steady = None
        self._left_waiting = False
        # From before the composition: an eviction for this step may free a slot for a request.
        self._version = self._kv.version
        return self._compose_ahead() if ahead_of else self._compose_with_evictions()

    def advance_steady_batch(self, batch: StepBatch) -> None:
        """Advances the batch if the next one has the same rows: no request arrived, left, or waits
        for the commit."""
        same = not self._left_waiting and self._version == self._kv.version
        if same and not batch.chunks:
            self._steady = batch
            self._needy = batch.decodes.advance()

    def commit_steady_batch(self, batch: StepBatch, sampled: list[int]) -> None:
        """Stores the drawn tokens in an advanced batch: its rows read them from the host again."""
        if batch is self._steady:
            batch.decodes.set_drawn(sampled)

    def skip_steady_batch(self, batch: StepBatch, steps: int) -> None:
        """Advances the batch by this many steps, if the next one has the same rows."""
        if self._version == self._kv.version and not batch.chunks:
            self._steady = batch
            batch.decodes.skip(steps)
            self._needy = np.flatnonzero(batch.decodes.positions % self._pool.block_tokens == 0)

    def _compose_ahead(self) -> StepBatch | None:
        """A batch of requests with a next token that does not depend on the step in flight, or that
        read its tokens on the device."""
        self._must_wait = False
        self._left_waiting = any(s.waits for s in self._kv.running.values())
        batch = self._compose()
        return None if self._must_wait else batch

    def _compose_with_evictions(self) -> StepBatch | None:
        """A batch, with the evictions that it needs."""
        batch = self._compose()
        while batch is None and self._suspects:  # no request of this part can run
            self._suspects.pass_part()
            batch = self._compose()
        if batch is None and self._static.current.force_progress():
            batch = self._compose()
        while batch is None and self._runnable() and self._evictor.free_memory():
            batch = self._compose()
        return batch

    def _compose(self) -> StepBatch | None:
        self._static.current.begin_step()
        runnable = self._runnable()
        # `is_decode`, without a call for each request.
        decoding = [s for s in runnable if 0 < s.computed == len(s.tokens) - 1]
        prefilling: list[Sequence] = []
        if len(decoding) < len(runnable):
            prefilling = [s for s in runnable if not s.is_decode]
        decodes, version = self._compose_decodes(decoding), self._kv.version
        room = self._max_batch_tokens - len(decodes)
        chunks = self._compose_chunks(prefilling, room)
        if self._kv.version != version:
            decodes = [s for s in decodes if _may_run(s)]  # not evicted meanwhile
        if not decodes and not chunks:
            return None
        if drafted := self._draft(decodes, chunks):
            drafting = {chunk.sequence for chunk in drafted}
            decodes = [s for s in decodes if s not in drafting]
            chunks = drafted + chunks
        tables = [self._pool.table(s.request_id) for s in decodes]
        return StepBatch(DecodeRows(decodes, tables, self._pool.block_tokens), chunks)

    @property
    def _may_draft(self) -> bool:
        """False while there is a static batch, in which each member draws one token per step, while
        a failed step is computed in parts, and while a step is in flight."""
        if self._suspects or self._ahead_of:
            return False
        return self._static.current.ends_known_ahead

    def _draft(self, decodes: list[Sequence], chunks: list[PrefillChunk]) -> list[PrefillChunk]:
        """Decodes with drafts, in what the others leave of the step's tokens, and of the rows of
        logits that score prompts otherwise."""
        if not self._may_draft:
            return []
        room = self._max_batch_tokens - len(decodes) - sum(chunk.tokens for chunk in chunks)
        to_score = self._max_scored_tokens - sum(chunk.scored for chunk in chunks)
        return self._speculation.draft(decodes, min(room, to_score))

    def _runnable(self) -> list[Sequence]:
        """Requests that may be in the next step if memory suffices."""
        running = self._kv.running.values()
        selected = self._static.current.select(running, self._max_running)
        return self._adapter_slots.narrow(self._suspects.narrow(selected))

    def _grow_rows(self, rows: DecodeRows) -> bool:
        """Allocates a block for each row that needs one; False when memory runs out."""
        for row in self._needy.tolist():
            sequence = rows.sequences[row]
            if not self._pool.grow(sequence.request_id, len(sequence.tokens)):
                return False
            rows.set_block(row, self._pool.table(sequence.request_id)[-1])
        return True

    def _compose_decodes(self, sequences: list[Sequence]) -> list[Sequence]:
        """Decodes with memory. One may evict another that got memory before it."""
        first = sequences[: self._max_batch_tokens]
        if len(first) <= self._pool.free_blocks:  # a decode needs one block at most
            size = self._pool.block_tokens
            for sequence in [s for s in first if not s.computed % size]:
                self._pool.grow(sequence.request_id, len(sequence.tokens))
            return first
        placed = [s for s in first if _may_run(s) and self._make_room(s)]
        return [s for s in placed if _may_run(s)]

    def _make_room(self, sequence: Sequence) -> bool:
        """Makes room for a decode, evicting if needed; False if it must wait or was evicted. A
        member that has ended evicts nothing."""
        while not self._pool.grow(sequence.request_id, len(sequence.tokens)):
            if sequence.ended:
                return False
            if self._ahead_of:
                self._must_wait = True
                return False
            if self._static.current.free_memory():
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
            if sequence.host_tokens:
                length = len(sequence.tokens)
                if self._reachable(sequence, length) < length or not self._kv.upload(sequence):
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
                return chunks  # later chunks must not take the blocks it waits for
            self._pool.grow(sequence.request_id, end)
            table = np.array(self._pool.table(sequence.request_id), np.int64)
            chunks.append(PrefillChunk(sequence, sequence.computed, end, table))
            room -= chunks[-1].tokens
            to_score -= chunks[-1].scored
        return chunks if self._suspects else chunks + self._static.current.pad_chunks(room)

    def _can_wait(self, sequence: Sequence, chunks: list[PrefillChunk]) -> bool:
        """Whether another request is computing the beginning of this one, in this step or in the
        one in flight, which publishes blocks only at its commit."""
        in_flight = self._ahead_of.chunks if self._ahead_of else ()
        if not chunks and not in_flight:
            return False
        waits = self._kv.can_wait(sequence, _sequences(chunks), _sequences(in_flight))
        self._left_waiting |= waits
        return waits

    def _reachable(self, sequence: Sequence, end: int) -> int:
        """The tokens up to `end` that fit into memory, evicting later requests if needed."""
        end = min(end, len(sequence.tokens))
        while end > self._pool.reach(sequence.request_id):
            if self._static.current.free_memory():
                continue
            victim = next(self._evictor.victims_for(sequence, decoding=False), None)
            if victim is None or not self._evictor.may_evict(victim):
                return self._pool.reach(sequence.request_id)
            if self._ahead_of:
                self._must_wait = True
                return self._pool.reach(sequence.request_id)
            self._evictor.evict(victim)
        return end


def _may_run(sequence: Sequence) -> bool:
    """Whether the request still runs: it was not evicted or stopped during the composition."""
    return sequence.phase is SequencePhase.RUNNING and sequence.within_budget


def _sequences(chunks: Iterable[PrefillChunk]) -> Iterable[Sequence]:
    return (chunk.sequence for chunk in chunks)

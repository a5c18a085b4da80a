"""Static batches: members begin together, are padded to the longest, and leave together (SCLS,
Cheng et al., 2024, §2.4).

    gathering  The batch waits for the prompts of all expected members. Nothing is computed.
    prefill    All contexts are prefilled, shorter ones with padding. No member decodes.
    decode     Each member decodes one token per step. An ended member continues; its tokens are
               invalid and not sent. A member without budget left waits for the others.
    over       No member has anything left to generate. Ends are sent. A member that did not end
               becomes an ordinary request without budget left.

Padding belongs to a member: its blocks count as the member's, its KV is neither read nor shared,
and it is freed when the member leaves or the batch is over. When memory runs out, padding is
dropped first, then the KV of ended members; only then is a member that still generates evicted.

A failed step is computed in parts (suspects.py): no member gets more than one step ahead of the
others, and the padding is omitted.

Pure, over the KV manager. Inactive without batches.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from services.core import FinishReason, StaticBatch
from services.worker.requests.batching import Batching, ContinuousBatching, Draw
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.types.batch import NewToken, PrefillChunk
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence, SequencePhase


class Stage(Enum):
    GATHERING = "gathering"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Batch:
    """A static batch. `awaited` are members without a prompt; `last` are the final tokens of ended
    members, kept until the batch is over."""

    number: int
    members: dict[str, Sequence] = field(default_factory=dict)
    awaited: dict[str, None] = field(default_factory=dict)  # a set in order, as in the plan
    last: dict[str, NewToken] = field(default_factory=dict)
    stage: Stage = Stage.GATHERING

    @property
    def is_over(self) -> bool:
        """No member has anything left to generate or to send."""
        members = self.members.values()
        return not any((s.within_budget or s.sampling_row >= 0) and not s.ended for s in members)

    @property
    def is_prefilled(self) -> bool:
        return not any(s.within_budget and not s.is_decode for s in self.members.values())


class StaticBatching(Batching):
    """All static batches of one replica. Even invalid tokens end at `reach_tokens`."""

    ends_known_ahead = False  # an ended member may continue with its batch

    def __init__(self, kv: KVManager, reach_tokens: int):
        self._kv = kv
        self._continuous = ContinuousBatching()
        self._reach_tokens = reach_tokens
        self._batches: dict[int, Batch] = {}
        self._batch_of: dict[str, Batch] = {}  # by member
        # batches with members that came, left, ended or used up their budgets
        self._changed: dict[int, Batch] = {}

    @property
    def current(self) -> Batching:
        """The batching in use: this while there is a static batch, else continuous batching."""
        return self if self._batches else self._continuous

    # Membership

    def gather(self, batch: StaticBatch, expected: Container[str]) -> None:
        """Begins a batch of running members and of those in `expected`. A known batch number has no
        effect. A member of another batch leaves that batch."""
        if batch.number in self._batches:
            return
        gathered = Batch(batch.number)
        for request_id in dict.fromkeys(batch.members):
            sequence = self._kv.sequences.get(request_id)
            if sequence and sequence.phase is SequencePhase.RUNNING and not sequence.ended:
                self.remove_from_batch(request_id)
                gathered.members[request_id] = sequence
            elif sequence is None and request_id in expected:
                self.remove_from_batch(request_id)
                gathered.awaited[request_id] = None
        self._batches[batch.number] = self._changed[batch.number] = gathered
        self._batch_of |= dict.fromkeys((*gathered.members, *gathered.awaited), gathered)
        self._kv.bump_version()

    def on_prompt(self, sequence: Sequence) -> None:
        """Adds an arrived request to the batch that awaits it, if any."""
        if batch := self._batch_of.get(sequence.request_id):
            batch.awaited.pop(sequence.request_id, None)
            batch.members[sequence.request_id] = sequence
            self._changed[batch.number] = batch

    def remove_from_batch(self, request_id: str) -> NewToken | None:
        """Removes a request from its batch, if it has one; returns its final token if it had
        ended."""
        batch = self._batch_of.pop(request_id, None)
        if batch is None:
            return None
        self._drop_pad(request_id)
        batch.members.pop(request_id, None)
        batch.awaited.pop(request_id, None)
        self._changed[batch.number] = batch
        self._kv.bump_version()
        return batch.last.pop(request_id, None)

    def settle(self) -> list[Batch]:
        """Begins complete batches; removes and returns those that are over. O(members) of the
        batches that changed since the last call."""
        over = []
        for number, batch in self._changed.items():
            if number not in self._batches or batch.awaited:
                continue
            if batch.is_over:
                self._forget(batch)
                over.append(batch)
            elif batch.stage is Stage.GATHERING:
                self._begin(batch)
        self._changed.clear()
        return over

    def dissolve(self) -> list[Batch]:
        """Ends and returns all batches, in any stage."""
        batches = list(self._batches.values())
        for batch in batches:
            self._forget(batch)
        self._changed.clear()
        return batches

    def _begin(self, batch: Batch) -> None:
        batch.stage = Stage.PREFILL
        longest = max(len(s.tokens) for s in batch.members.values())
        for request_id, sequence in batch.members.items():
            if missing := longest - len(sequence.tokens):
                self._kv.pads[request_id] = _padding(request_id, missing)
        self._kv.bump_version()

    def _forget(self, batch: Batch) -> None:
        del self._batches[batch.number]
        for request_id in (*batch.members, *batch.awaited):
            del self._batch_of[request_id]
            self._drop_pad(request_id)
        self._kv.bump_version()

    # Selection for a step

    @property
    def is_steady(self) -> bool:
        return not (self._changed or self._prefilling())

    def begin_step(self) -> None:
        """Moves fully prefilled batches to the decode stage. O(members) of prefilling batches."""
        for batch in self._prefilling():
            if batch.is_prefilled and not any(True for _ in self._uncomputed_padding(batch)):
                batch.stage = Stage.DECODE

    def force_progress(self) -> bool:
        """Called when nothing can run: batches that lack memory for their prefill decode early;
        False without any."""
        stuck = [
            batch
            for batch in self._prefilling()
            if not any(s.upload_serial for s in batch.members.values())
        ]
        for batch in stuck:
            for pad in self._uncomputed_padding(batch):
                self.leave_out(pad)
            batch.stage = Stage.DECODE
        return bool(stuck)

    def select(self, running: Iterable[Sequence], slots: int) -> list[Sequence]:
        """Requests that may be in the next step, in order of admission, ended members last. A
        request with nothing to generate takes no slot. O(running)."""
        generating: list[Sequence] = []
        ended: list[Sequence] = []
        for sequence in running:
            if sequence.within_budget and not sequence.upload_serial and self._may_run(sequence):
                (ended if sequence.ended else generating).append(sequence)
        return (generating + ended)[:slots]

    def _may_run(self, sequence: Sequence) -> bool:
        batch = self._batch_of.get(sequence.request_id)
        if batch is None or batch.stage is Stage.DECODE:
            return True
        return batch.stage is Stage.PREFILL and not sequence.is_decode

    def pad_chunks(self, room: int) -> list[PrefillChunk]:
        """Padding for the rest of a step; it uses only free memory."""
        pool, chunks = self._kv.pool, []
        for pad in [pad for batch in self._prefilling() for pad in self._uncomputed_padding(batch)]:
            if room <= 0:
                break
            reach = pool.reach(pad.request_id)
            if reach < len(pad.tokens) - 1:
                self._cut(pad, reach)
            end = min(len(pad.tokens) - 1, pad.computed + room)
            if end > pad.computed:
                pool.grow(pad.request_id, end)
                table = np.array(pool.table(pad.request_id), np.int64)
                chunks.append(PrefillChunk(pad, pad.computed, end, table))
                room -= chunks[-1].tokens
        return chunks

    def padding_in(self, chunks: Iterable[PrefillChunk]) -> list[PrefillChunk]:
        """The chunks that are padding."""
        pads = set(self._kv.pads.values())
        return [chunk for chunk in chunks if chunk.sequence in pads]

    def leave_out(self, pad: Sequence) -> None:
        """Stops computing this padding."""
        self._cut(pad, pad.computed)

    def _prefilling(self) -> list[Batch]:
        return [batch for batch in self._batches.values() if batch.stage is Stage.PREFILL]

    def _uncomputed_padding(self, batch: Batch) -> Iterator[Sequence]:
        """The batch's padding that is not computed yet."""
        for request_id in batch.members:
            pad = self._kv.pads.get(request_id)
            if pad and pad.computed < len(pad.tokens) - 1:
                yield pad

    def _cut(self, pad: Sequence, end: int) -> None:
        """Truncates padding."""
        self._kv.counters.padding_left_out_tokens += len(pad.tokens) - 1 - end
        del pad.tokens[end + 1 :]

    def _drop_pad(self, request_id: str) -> None:
        if pad := self._kv.pads.pop(request_id, None):
            self._kv.pool.release(pad.request_id)

    # Memory

    def free_memory(self) -> bool:
        """Called when memory runs out: frees padding or ended members, the newest batch's first;
        False without any. O(members)."""
        for request_id, batch in reversed(self._batch_of.items()):
            pad = self._kv.pads.get(request_id)
            if pad and self._kv.pool.table(pad.request_id):
                self.leave_out(pad)
                self._drop_pad(request_id)
                return True
            sequence = batch.members.get(request_id)
            if sequence and sequence.ended and sequence.computed:
                self._kv.stop_computing(sequence)
                return True
        return False

    # Ends

    def end(self, sequence: Sequence, reason: FinishReason) -> bool:
        batch = self._batch_of.get(sequence.request_id)
        if batch is None:
            return False
        sequence.ended, sequence.unsent = reason, 1
        sequence.limit_length, sequence.max_length = self._reach_tokens, self._reach_tokens + 1
        self._changed[batch.number] = batch
        if not sequence.within_budget:
            self._kv.bump_version()
        return True

    def on_budget_changed(self, sequence: Sequence) -> bool:
        """Records that a budget was used up or changed; returns whether that is reported at the end
        of the batch."""
        batch = self._batch_of.get(sequence.request_id)
        if batch:
            self._changed[batch.number] = batch
        return batch is not None

    def accept_draws(self, draws: Iterable[Draw]) -> Iterator[Draw]:
        """The valid draws of a step; stores the invalid ones."""
        for row, sequence, token in draws:
            if not sequence.ended:
                yield row, sequence, token
                continue
            sequence.set_drawn(token)
            sequence.unsent += 1
            self._kv.counters.invalid_tokens += 1
            if not sequence.within_budget:
                self._kv.bump_version()

    def record_repeats(self, rows: Iterable[Sequence], steps: int) -> None:
        for sequence in rows:
            if sequence.ended:
                sequence.unsent += steps
                self._kv.counters.invalid_tokens += steps

    def release_tokens(
        self, chunks: Iterable[PrefillChunk], tokens: list[NewToken]
    ) -> list[NewToken]:
        """Counts the computed padding. A member's last token waits for its batch's end."""
        self._kv.counters.padding_tokens += sum(chunk.tokens for chunk in self.padding_in(chunks))
        released = []
        for token in tokens:
            batch = self._batch_of.get(token.request_id) if token.finish else None
            if batch:
                batch.last[token.request_id] = token
            else:
                released.append(token)
        return released

    def check_integrity(self) -> None:
        """Batches, members and padding agree. Raises AssertionError."""
        members = {r: b for b in self._batches.values() for r in (*b.members, *b.awaited)}
        assert members == self._batch_of, "a member is in two batches, or in none"
        assert self._kv.pads.keys() <= members.keys(), "padding without a member"
        for pad in self._kv.pads.values():
            assert pad.computed < len(pad.tokens), "padding draws a token"
            assert pad.computed <= self._kv.pool.reach(pad.request_id), "padding without a block"
        for number, batch in self._batches.items():
            assert number in self._changed or batch.awaited or not batch.is_over, (
                "a batch is over and not marked as changed"
            )
            assert not batch.awaited.keys() & self._kv.sequences.keys(), "an awaited member is here"
            for request_id, sequence in batch.members.items():
                assert self._kv.running.get(request_id) is sequence, "a member does not run"
                assert bool(sequence.ended) == (request_id in batch.last)
        for sequence in self._kv.sequences.values():
            assert not sequence.ended or sequence.request_id in self._batch_of, (
                "an ended request is in no batch"
            )


def _padding(request_id: str, tokens: int) -> Sequence:
    """A padding sequence. It has one token more, so that it never draws. No request has its id,
    because request ids end in a number (gateway/sessions/table.py)."""
    length = tokens + 1
    prompt = Prompt(f"{request_id}\0padding", (0,) * length, length, 1)
    pad = Sequence.start(prompt, 0)
    pad.exact = False  # never shared
    return pad

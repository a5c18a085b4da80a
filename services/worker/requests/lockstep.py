"""Static batches: who begins together, pays for padding, and leaves together (papers/003 §2.4).

    gathering  until the prompts of all who are expected are here; nothing of them is computed
    prefill    all contexts, and padding for each that is shorter than the longest; nobody decodes
    decode     one token each a step. Who has ended goes on: its tokens are invalid, nobody reads
               them. Who has made what it may rests until the others have, too
    over       nobody has anything left to make: ends are told, and whoever did not end is a
               sequence like any other, its budget used up

Padding belongs to the member it pads: its blocks are that member's, its KV is read by nobody and
found by nobody, and it goes when the member leaves or the batch is over. What nobody reads is paid
for with time and memory that are there: when memory is out, padding gives way first, then what
ended members hold, and only then somebody who still has tokens to make.

A step that breaks is computed in parts (suspects.py): nobody of a batch gets further than one step
ahead of the others, and its padding is left out.

Pure, over the kv. While there is no batch, nothing here is asked anything.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from services.core import FinishReason, StaticBatch
from services.worker.requests.batch import NewToken, PrefillChunk
from services.worker.requests.counters import Counters
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.prompt import Prompt
from services.worker.requests.sequence import Phase, Sequence

Row = tuple[int, Sequence, int]  # of a step's draws: its place, who drew, what


class Stage(Enum):
    GATHERING = "gathering"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Batch:
    """`awaited` are members whose prompts are not here, `last` the tokens that members ended
    with, kept until it is over."""

    number: int
    members: dict[str, Sequence] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)
    last: dict[str, NewToken] = field(default_factory=dict)
    stage: Stage = Stage.GATHERING

    @property
    def is_over(self) -> bool:
        """Nobody has anything left to make, nor to be told."""
        members = self.members.values()
        return not any((s.within_budget or s.drawing >= 0) and not s.ended for s in members)

    @property
    def is_prefilled(self) -> bool:
        return not any(s.within_budget and not s.is_decode for s in self.members.values())


class Lockstep:
    """All static batches of one replica. `reach_tokens` is where even invalid tokens end."""

    def __init__(self, kv: KVManager, counters: Counters, reach_tokens: int):
        self._kv = kv
        self._counters = counters
        self._reach_tokens = reach_tokens
        self._batches: dict[int, Batch] = {}
        self._of: dict[str, Batch] = {}  # by member
        self._changed: dict[int, Batch] = {}  # where somebody came, left, ended or used up

    @property
    def active(self) -> bool:
        """Whether there is any batch."""
        return bool(self._batches)

    # Who is in which batch

    def gather(self, batch: StaticBatch, expected: Container[str]) -> None:
        """Begin a batch of those who run, and of those `expected` to. One that was named before
        changes nothing; whoever still stands in another leaves that."""
        if batch.number in self._batches:
            return
        gathered = Batch(batch.number)
        for request_id in dict.fromkeys(batch.members):
            sequence = self._kv.sequences.get(request_id)
            if sequence and sequence.phase is Phase.RUNNING and not sequence.ended:
                self.leave(request_id)
                gathered.members[request_id] = sequence
            elif sequence is None and request_id in expected:
                self.leave(request_id)
                gathered.awaited.add(request_id)
        self._batches[batch.number] = self._changed[batch.number] = gathered
        self._of |= dict.fromkeys((*gathered.members, *gathered.awaited), gathered)
        self._kv.touch()

    def came(self, sequence: Sequence) -> None:
        """A request is here: it may have been expected."""
        if batch := self._of.get(sequence.request_id):
            batch.awaited.discard(sequence.request_id)
            batch.members[sequence.request_id] = sequence
            self._changed[batch.number] = batch

    def leave(self, request_id: str) -> NewToken | None:
        """It is in no batch any more; the token that it ended with, where it had ended. Nothing
        happens to a request that is in none."""
        batch = self._of.pop(request_id, None)
        if batch is None:
            return None
        self._drop_pad(request_id)
        batch.members.pop(request_id, None)
        batch.awaited.discard(request_id)
        self._changed[batch.number] = batch
        self._kv.touch()
        return batch.last.pop(request_id, None)

    def settle(self) -> list[Batch]:
        """Let begin who has everybody; returns the batches that are over, forgotten here.
        O(members) of the batches in which something has happened since the last call."""
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
        """End all batches as they are; returns them."""
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
        self._kv.touch()

    def _forget(self, batch: Batch) -> None:
        del self._batches[batch.number]
        for request_id in (*batch.members, *batch.awaited):
            del self._of[request_id]
            self._drop_pad(request_id)
        self._kv.touch()

    # What a step may compute

    def advance(self) -> None:
        """Let decode who has prefilled all. O(members) of those who have not."""
        for batch in self._prefilling():
            if batch.is_prefilled and not any(True for _ in self._unpaid(batch)):
                batch.stage = Stage.DECODE

    def hurry(self) -> bool:
        """Nothing can run: a batch that prefills for want of memory decodes first, as far as its
        members are; False if there is none."""
        stuck = [
            batch
            for batch in self._prefilling()
            if not any(s.arriving for s in batch.members.values())
        ]
        for batch in stuck:
            for pad in self._unpaid(batch):
                self.leave_out(pad)
            batch.stage = Stage.DECODE
        return bool(stuck)

    def runnable(self, running: Iterable[Sequence], places: int) -> list[Sequence]:
        """Who may be in the next step, in order of admission; ended members behind all others.
        Whoever has nothing to make takes no place. O(running)."""
        making: list[Sequence] = []
        ended: list[Sequence] = []
        for sequence in running:
            if sequence.within_budget and not sequence.arriving and self._may_run(sequence):
                (ended if sequence.ended else making).append(sequence)
        return (making + ended)[:places]

    def _may_run(self, sequence: Sequence) -> bool:
        batch = self._of.get(sequence.request_id)
        if batch is None or batch.stage is Stage.DECODE:
            return True
        return batch.stage is Stage.PREFILL and not sequence.is_decode

    def pad_chunks(self, room: int) -> list[PrefillChunk]:
        """Padding for what is left of a step; memory is taken where it is free."""
        pool, chunks = self._kv.pool, []
        for pad in [pad for batch in self._prefilling() for pad in self._unpaid(batch)]:
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

    def paid(self, chunks: Iterable[PrefillChunk]) -> None:
        """These were computed: count what was padding."""
        self._counters.padding_tokens += sum(chunk.tokens for chunk in self.padding_in(chunks))

    def padding_in(self, chunks: Iterable[PrefillChunk]) -> list[PrefillChunk]:
        """Those of them that are padding."""
        pads = set(self._kv.pads.values())
        return [chunk for chunk in chunks if chunk.sequence in pads]

    def leave_out(self, pad: Sequence) -> None:
        """Compute nothing more of this padding."""
        self._cut(pad, pad.computed)

    def _prefilling(self) -> list[Batch]:
        return [batch for batch in self._batches.values() if batch.stage is Stage.PREFILL]

    def _unpaid(self, batch: Batch) -> Iterator[Sequence]:
        """The batch's padding that is not computed yet."""
        for request_id in batch.members:
            pad = self._kv.pads.get(request_id)
            if pad and pad.computed < len(pad.tokens) - 1:
                yield pad

    def _cut(self, pad: Sequence, end: int) -> None:
        """Go no further with it than that."""
        self._counters.padding_left_out_tokens += len(pad.tokens) - 1 - end
        del pad.tokens[end + 1 :]

    def _drop_pad(self, request_id: str) -> None:
        if pad := self._kv.pads.pop(request_id, None):
            self._kv.pool.release(pad.request_id)

    # Memory

    def give_way(self) -> bool:
        """Memory is out: free some that nobody reads, the newest batch's first; False if there is
        none. O(members)."""
        for request_id, batch in reversed(self._of.items()):
            pad = self._kv.pads.get(request_id)
            if pad and self._kv.pool.table(pad.request_id):
                self._cut(pad, pad.computed)
                self._drop_pad(request_id)
                return True
            sequence = batch.members.get(request_id)
            if sequence and sequence.ended and sequence.computed:
                self.stop(sequence)
                return True
        return False

    def stop(self, sequence: Sequence) -> None:
        """Compute nothing more of one that has ended."""
        self._kv.forgo(sequence)

    # Ends

    def end(self, sequence: Sequence, reason: FinishReason) -> bool:
        """It has ended; whether it goes on with its batch, untold."""
        batch = self._of.get(sequence.request_id)
        if batch is None:
            return False
        sequence.ended, sequence.untold = reason, 1
        sequence.limit_length, sequence.max_length = self._reach_tokens, self._reach_tokens + 1
        self._changed[batch.number] = batch
        if not sequence.within_budget:
            self._kv.touch()
        return True

    def rebudgeted(self, sequence: Sequence) -> bool:
        """Its budget is used up, or another; whether it is told with its batch's end."""
        batch = self._of.get(sequence.request_id)
        if batch:
            self._changed[batch.number] = batch
        return batch is not None

    def discard(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Those of a step's draws that somebody reads; the others are taken here."""
        for row, sequence, token in rows:
            if not sequence.ended:
                yield row, sequence, token
                continue
            sequence.learn(token)
            sequence.untold += 1
            self._counters.invalid_tokens += 1
            if not sequence.within_budget:
                self._kv.touch()

    def withhold(self, tokens: list[NewToken]) -> list[NewToken]:
        """Those that are told now: the last of a member waits for its batch's end."""
        told = []
        for token in tokens:
            batch = self._of.get(token.request_id) if token.finish else None
            if batch:
                batch.last[token.request_id] = token
            else:
                told.append(token)
        return told

    def check_integrity(self) -> None:
        """Batches, members and padding agree. Raises AssertionError."""
        members = {r: b for b in self._batches.values() for r in (*b.members, *b.awaited)}
        assert members == self._of, "a member is in two batches, or in none"
        assert self._kv.pads.keys() <= members.keys(), "padding of nobody's"
        for pad in self._kv.pads.values():
            assert pad.computed < len(pad.tokens), "padding that draws"
            assert pad.computed <= self._kv.pool.reach(pad.request_id), "without a block"
        for number, batch in self._batches.items():
            assert number in self._changed or batch.awaited or not batch.is_over, "over, unseen"
            assert not batch.awaited & self._kv.sequences.keys(), "awaited, and here"
            for request_id, sequence in batch.members.items():
                assert self._kv.running.get(request_id) is sequence, "a member does not run"
                assert bool(sequence.ended) == (request_id in batch.last)
        for sequence in self._kv.sequences.values():
            assert not sequence.ended or sequence.request_id in self._of, "ended, and still here"


def _padding(request_id: str, tokens: int) -> Sequence:
    """So many tokens of nobody: one more stands behind them, so that none is ever drawn. No
    request is called as it is: names of requests end in a number (gateway/sessions/roster.py)."""
    length = tokens + 1
    prompt = Prompt(f"{request_id}\0padding", (0,) * length, length, 1)
    pad = Sequence.start(prompt, 0)
    pad.exact = False  # nobody finds it
    return pad

"""The step in flight: launched, and not committed. Its tokens are on the device, and unknown here.

Everybody in it goes on as if its token were known: that one has its place and its length, and the
KV that the step stores counts, as whatever is issued to the device from now on comes behind it.
What depends on the token's value waits. It is neither told nor reported, no key of a shared block
is made of it, and whoever it ends has not ended. Meanwhile anything may happen:

    cancelled, forgotten, submitted anew     it is drawn in vain, and counted as stray. A Sequence
                                             is known by its identity: another may have its name
    paused, evicted, offloaded               it comes all the same, and the scheduler is told.
                                             Admitted again before, one whose KV was dropped waits
    ended by it, and in the step behind it   that row is stray, too. What it stores lies behind all
                                             that is published, in blocks that may be given away at
                                             once: a new owner's writes are issued later
    its step breaks                          everybody is where it was before
"""

from collections.abc import Iterable

from services.worker.requests.batch import StepBatch
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.scores import PromptLogprobs
from services.worker.requests.sequence import Sequence


class InFlight:
    """At most one step."""

    def __init__(self, kv: KVManager):
        self._kv = kv
        self._batch: StepBatch | None = None

    def __bool__(self) -> bool:
        return self._batch is not None

    @property
    def batch(self) -> StepBatch | None:
        return self._batch

    def launch(self, batch: StepBatch) -> bool:
        """It is in flight; whether somebody has all the tokens now that it may have. Who has gone
        since it was composed stands in it for nothing. O(rows)."""
        assert self._batch is None, "a step is in flight"
        self._batch = batch
        for chunk in batch.chunks:
            chunk.sequence.computed = chunk.end
        here, used_up = self._kv.sequences, False
        for row, sequence in enumerate(batch.sampling):
            if here.get(sequence.request_id) is not sequence:
                self._kv.counters.stray_rows += 1
            elif not sequence.advance(row):
                used_up = True
        return used_up

    def land(self, batch: StepBatch, scores: Iterable[PromptLogprobs] = ()) -> None:
        """It is computed, and its tokens are there to be learnt; `scores` of `batch.scored`."""
        assert self._batch is batch, "another step is in flight"
        self._batch = None
        for chunk, part in zip(batch.scored, scores, strict=True):
            if chunk.sequence.scores is not None:
                chunk.sequence.scores.fill(chunk.start, part)

    def unwind(self) -> list[Sequence]:
        """It broke: whoever stood in it is where it was before, or, if its KV was moved since, has
        none. Returns those of the latter who wait. Nothing was published, so nobody else has any of
        it. Nothing happens where no step is in flight."""
        batch, self._batch = self._batch, None
        if batch is None:
            return []
        began = [(s, len(s.tokens) - 2) for s in batch.decodes.sequences]
        began += [(chunk.sequence, chunk.start) for chunk in batch.chunks]
        return [s for s, computed in began if self._kv.is_here(s) and self._unwind(s, computed)]

    def _unwind(self, sequence: Sequence, computed: int) -> bool:
        if sequence.drawing >= 0:
            sequence.unlearn()
        return self._kv.unwind(sequence, computed) is not None

    def check_integrity(self) -> None:
        """Every unknown token is drawn by this step. Raises AssertionError."""
        sampling = self._batch.sampling if self._batch else []
        expected = {s.request_id: row for row, s in enumerate(sampling) if self._kv.is_here(s)}
        drawing = {r: s.drawing for r, s in self._kv.sequences.items() if s.drawing >= 0}
        assert drawing == expected, "a token is unknown that no step draws, or known that one does"

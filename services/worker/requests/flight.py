"""The step in flight: launched and not committed. Its tokens are on the device, and unknown here.

Each of its requests continues as if its token were known: the token counts for the length, and the
KV that the step stores counts, because whatever is issued to the device from now on comes after it.
What depends on the token's value waits: the token is neither sent nor reported, it is not part of a
shared block's key, and a request that it ends has not ended. Meanwhile any of these may happen:

    cancelled, dropped, resubmitted          its token is discarded and counted as stray. A Sequence
                                             is compared by identity: another may have its name
    paused, evicted, offloaded               its token still arrives and is reported. If it is
                                             admitted before and its KV was dropped, it waits
    ended by it, and in the next step        that row is stray, too. Its writes lie behind all
                                             published blocks, in blocks that can be reused at once:
                                             a new owner's writes are issued later
    the step fails                           every request is where it was before
"""

from collections.abc import Iterable

from services.worker.requests.kv_manager import KVManager
from services.worker.requests.types.batch import StepBatch
from services.worker.requests.types.scores import PromptLogprobs
from services.worker.requests.types.sequence import Sequence


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
        """Marks the step as in flight; returns whether some request now has all tokens it may have.
        Requests that left after composition are ignored. O(rows)."""
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
        """The step is computed, and its tokens can be stored; `scores` of `batch.scored`."""
        assert self._batch is batch, "another step is in flight"
        self._batch = None
        for chunk, part in zip(batch.scored, scores, strict=True):
            if chunk.sequence.scores is not None:
                chunk.sequence.scores.fill(chunk.start, part)

    def unwind(self) -> list[Sequence]:
        """The step failed: its requests are where they were before, or without KV if it was moved
        meanwhile. Returns those of the latter that wait. Nothing was published, so that no other
        request has any of it. No effect without a step in flight."""
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

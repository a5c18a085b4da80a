"""The step in flight: launched and not committed. Its tokens are on the device, and unknown here.

Each of its requests continues as if its token were known. The token counts for the length, and the
KV that the step stores counts, because later work on the device is issued after the step. What
depends on the token's value waits: the token is neither sent nor reported, it is not part of a
shared block's key, and a request that it ends has not ended. Until the commit, these events may
happen to a request:

    cancelled, dropped, resubmitted   Its token is discarded and counted as stray. Sequences are
                                      compared by identity, because another may have the same id.
    paused, evicted, offloaded        Its token still arrives and is reported. If the request is
                                      admitted again before and its KV was dropped, it waits.
    ended by its token, but also in   Its row of that step is stray, too. The row writes behind all
    the step composed after           published blocks, into blocks that can be reused at once: the
                                      writes of a new owner are issued later.
    the step fails                    It returns to its state before the step.
"""

from collections.abc import Iterable

from services.worker.requests.kv_manager import KVManager
from services.worker.requests.types.batch import StepBatch
from services.worker.requests.types.scores import PromptLogprobs
from services.worker.requests.types.sequence import Sequence


class InFlight:
    """Holds at most one step."""

    def __init__(self, kv: KVManager):
        self._kv = kv
        self.batch: StepBatch | None = None

    def __bool__(self) -> bool:
        return self.batch is not None

    def launch(self, batch: StepBatch) -> bool:
        """Marks the step as in flight; returns whether some request now has all tokens of its
        budget. Ignores requests that left after composition. O(rows)."""
        assert self.batch is None, "a step is in flight"
        self.batch = batch
        for chunk in batch.chunks:
            chunk.sequence.computed = chunk.known_end
        here, used_up = self._kv.sequences, False
        for row, sequence in enumerate(batch.sampling):
            if here.get(sequence.request_id) is not sequence:
                self._kv.counters.stray_rows += 1
            elif not sequence.advance(row):
                used_up = True
        return used_up

    def land(self, batch: StepBatch, scores: Iterable[PromptLogprobs] = ()) -> None:
        """Ends the flight of a computed step, and stores the `scores` of `batch.scored`."""
        assert self.batch is batch, "another step is in flight"
        self.batch = None
        for chunk, part in zip(batch.scored, scores, strict=True):
            if chunk.sequence.scores is not None:
                chunk.sequence.scores.fill(chunk.start, part)

    def unwind(self) -> list[Sequence]:
        """Undoes the failed step: its requests return to their state before it, or lose their KV if
        it was moved meanwhile. Returns requests that lost it and do not run. No other request uses
        KV of the step, because nothing was published. No effect without a step in flight."""
        batch, self.batch = self.batch, None
        if batch is None:
            return []
        began = [(s, len(s.tokens) - 2) for s in batch.decodes.sequences]
        began += [(chunk.sequence, chunk.start) for chunk in batch.chunks]
        return [s for s, computed in began if self._kv.is_here(s) and self._unwind(s, computed)]

    def _unwind(self, sequence: Sequence, computed: int) -> bool:
        if sequence.sampling_row >= 0:
            sequence.undo_advance()
        return self._kv.unwind(sequence, computed) is not None

    def check_integrity(self) -> None:
        """Every unknown token is drawn by this step. Raises AssertionError."""
        sampling = self.batch.sampling if self.batch else []
        expected = {s.request_id: row for row, s in enumerate(sampling) if self._kv.is_here(s)}
        sampling_rows = {
            r: s.sampling_row for r, s in self._kv.sequences.items() if s.sampling_row >= 0
        }
        assert sampling_rows == expected, "unknown tokens differ from the draws in flight"

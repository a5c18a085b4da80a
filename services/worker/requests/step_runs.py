"""StepRuns: a batch computed for several steps at once, in place of compose and commit for each.

Only lengths change within such steps: every row draws the same token, which ends nothing. The
simulator computes its decode steps so. The state afterwards equals that of single steps.
"""

from collections.abc import Mapping

import numpy as np

from services.worker.requests.kv_manager import KVManager
from services.worker.requests.reporting import Reporter
from services.worker.requests.static_batching import StaticBatching
from services.worker.requests.step_cycle import StepCycle
from services.worker.requests.types.batch import NO_INTS, DecodeRows, Ints, NewToken, StepBatch
from services.worker.requests.types.sequence import Sequence


class StepRuns:
    """Computes batches that `steps` composed."""

    def __init__(self, steps: StepCycle, kv: KVManager, static: StaticBatching, reporter: Reporter):
        self._steps = steps
        self._kv = kv
        self._static = static
        self._reporter = reporter
        self._limits_of: DecodeRows | None = None
        self._limits: tuple[int, Ints, Ints] = (0, NO_INTS, NO_INTS)

    def repeatable(self, batch: StepBatch) -> int:
        """How many times the composed batch can be computed before its result matters: only lengths
        change, no budget ends, no report is due, and memory suffices for the step that follows.
        Ends that a drawn token decides are not considered. O(rows · log steps)."""
        if batch.chunks or not (self._steps.is_clean and self._static.current.is_steady):
            return 0
        rows = batch.decodes
        budget = int((self._lengths(rows)[1] - rows.positions).min()) - 1
        most = min(budget, self._reporter.steps_until_report) - 1
        return self._steps_in_memory(rows, most)

    def limit_lengths(self, rows: DecodeRows) -> Ints:
        """The budget of each row, as a length. O(rows) if rows or budgets have changed."""
        return self._lengths(rows)[0]

    def _lengths(self, rows: DecodeRows) -> tuple[Ints, Ints]:
        """The budgets of these rows, and what remains of them below the greatest lengths."""
        version, limits, ends = self._limits
        if rows is not self._limits_of or version != self._kv.limits_version:
            limits = np.array([s.limit_length for s in rows.sequences], np.int64)
            ends = np.minimum(limits, [s.max_length for s in rows.sequences])
            self._limits_of, self._limits = rows, (self._kv.limits_version, limits, ends)
        return limits, ends

    def repeat(self, batch: StepBatch, times: int, token: int) -> None:
        """Computes a composed batch this many times at once, at most `repeatable`; each row draws
        `token`, which ends nothing. The next step must be composed anew. O(rows)."""
        self._lengthen(batch.decodes, times, token)
        self._kv.bump_version()
        self._static.current.record_repeats(batch.decodes.sequences, times)
        self._reporter.record_steps(times)

    @property
    def commits_at_once(self) -> bool:
        """Whether the last step, too, may be computed at once: by `compute` and `commit`."""
        return self._static.current.ends_known_ahead and self._steps.is_clean

    def compute(self, batch: StepBatch, steps: int, token: int) -> None:
        """Computes a composed batch `steps` times, if `commits_at_once`: more than once for at most
        one step more than `repeatable`. Each row draws `token` in each step. O(rows)."""
        for chunk in batch.chunks:
            chunk.sequence.computed = chunk.end
            if chunk.samples:
                chunk.sequence.tokens.append(token)
        self._kv.publish_all(batch.chunks)  # before the decodes, as `StepCycle.commit` does
        self._lengthen(batch.decodes, steps, token)

    def commit(self, batch: StepBatch, steps: int, last: Mapping[int, int]) -> list[NewToken]:
        """Commits the steps of `compute`. Their tokens end neither a request nor a budget. In the
        last step, the rows of `last`, indices of `batch.sampling`, draw these tokens instead; they
        include every chunk that draws. Returns the tokens of `last`. O(last)."""
        batching, sampling = self._static.current, batch.sampling
        tokens = [
            self._steps.commit_draw(batching, sampling[row], drawn, None)
            for row, drawn in last.items()
        ]
        if tokens:
            self._kv.bump_version()
        self._reporter.record_steps(steps)
        self._steps.composer.skip_steady_batch(batch, steps)
        return tokens

    def _steps_in_memory(self, rows: DecodeRows, most: int) -> int:
        """How many steps, at most `most`, these requests can all decode before a block is short for
        the step after them. O(rows · log most)."""
        pool = self._kv.pool
        size, free = pool.block_tokens, pool.free_blocks
        if len(rows) * (-(-max(0, most) // size)) <= free:
            return max(0, most)
        lengths = rows.positions + 1
        held = sum(len(pool.table(s.request_id)) for s in rows.sequences)
        room = held + free
        fits, above = 0, max(0, most) + 1  # fits(0) holds: the batch is composed
        while above - fits > 1:
            middle = (fits + above) // 2
            enough = int((-(-(lengths + middle) // size)).sum()) <= room
            fits, above = (middle, above) if enough else (fits, middle)
        return fits

    def _lengthen(self, rows: DecodeRows, steps: int, token: int) -> None:
        """Each of these requests draws `token` in each of these decode steps. O(rows), and with
        shared prefixes O(rows + full blocks log full blocks)."""
        drawn = [token] * steps
        for sequence in rows.sequences:
            sequence.tokens += drawn
        if self._kv.sharing:
            self._fill_blocks(rows, steps)
        for sequence in rows.sequences:
            sequence.computed = len(sequence.tokens) - 1
        pool = self._kv.pool
        size = pool.block_tokens
        longer = rows.positions % size + (steps - 1) >= size
        for row in longer.nonzero()[0].tolist():
            sequence = rows.sequences[row]
            pool.grow(sequence.request_id, sequence.computed)

    def _fill_blocks(self, rows: DecodeRows, steps: int) -> None:
        """Publishes the blocks that each step fills, then takes the next ones, step by step: a new
        block may evict a cached one, and another request then publishes that key."""
        pool = self._kv.pool
        size = pool.block_tokens
        filled: dict[int, list[tuple[Sequence, int]]] = {}  # by step: rows and their last position
        for sequence, start in zip(rows.sequences, rows.positions.tolist(), strict=True):
            for position in range(start + size - 1 - start % size, start + steps, size):
                filled.setdefault(position - start, []).append((sequence, position))
        for step in sorted(filled):
            for sequence, position in filled[step]:
                sequence.computed = position + 1
                if not sequence.ended:  # invalid tokens are not published
                    self._kv.publish(sequence)
            if step < steps - 1:
                for sequence, position in filled[step]:
                    pool.grow(sequence.request_id, position + 2)

"""StepCycle: composes steps of the running requests and commits their tokens. Pure, without I/O.

The engine calls `compose`, computes the step, and calls `commit` with its tokens, or `fail`. One
step may be in flight: `advance` marks it as launched, and the next one can be composed. Between
`compose` and `advance` (or `commit`, if nothing is composed ahead), the only permitted call commits
the step in flight. Between `advance` and `commit` any call is permitted (see flight.py).
"""

from collections.abc import Iterable, Mapping
from itertools import islice

from services.core import FinishReason
from services.costs import StepTiming
from services.worker.requests.adapter_slots import AdapterSlots
from services.worker.requests.batching import Batching
from services.worker.requests.composer import Composer
from services.worker.requests.ends import RequestEnds
from services.worker.requests.evictor import Evictor
from services.worker.requests.flight import InFlight
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.reporting import Reporter
from services.worker.requests.speculation import Speculation
from services.worker.requests.static_batching import StaticBatching
from services.worker.requests.suspects import Suspects
from services.worker.requests.types.batch import (
    NewToken,
    PrefillChunk,
    StepBatch,
    StepResult,
    TokenLogprobs,
)
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.scores import PromptLogprobs
from services.worker.requests.types.sequence import Sequence, SequencePhase


class StepCycle:
    """Holds at most one step in flight, and one composed after it."""

    def __init__(
        self,
        limits: Limits,
        kv: KVManager,
        static: StaticBatching,
        evictor: Evictor,
        ends: RequestEnds,
        reporter: Reporter,
    ):
        self._limits = limits
        self._kv = kv
        self._static = static
        self._evictor = evictor
        self._ends = ends
        self._reporter = reporter
        self._suspects = Suspects()
        self._speculation = Speculation(limits.drafts, kv.pool, kv.counters)
        self.adapter_slots = AdapterSlots(limits.adapter_slots, limits.adapter_turn_steps)
        self.composer = Composer(
            kv, evictor, static, self._suspects, self._speculation, self.adapter_slots, limits
        )
        self._flight = InFlight(kv)

    @property
    def is_clean(self) -> bool:
        """Whether no step is in flight, and none failed that is computed again in parts."""
        return not (self._flight or self._suspects)

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched and not committed."""
        return bool(self._flight)

    def compose(self) -> StepBatch | None:
        """The next step with its memory. None if nothing can run, or if the step depends on the end
        of the one in flight, as with exhausted memory, static batches, and grammars, which need the
        newest token on the host: then compose again after the commit. Rows may read tokens of the
        step in flight (`DecodeRows.fed`)."""
        if in_flight := self._flight.batch:
            must_wait = (
                not self._static.current.ends_known_ahead or self._suspects or in_flight.constrained
            )
            return None if must_wait else self.composer.compose(in_flight)
        self._ends.settle_batches()
        batch = self.composer.compose()
        if batch is None:
            # The composer may have evicted the last request that a batch waited for.
            self._ends.settle_batches()
        return batch

    def withdraw(self) -> None:
        """Discards the last composed step, which was not launched. The next one is composed again,
        so that kernels rebuild what they keep per batch."""
        self._kv.bump_version()

    def advance(self, batch: StepBatch) -> None:
        """Marks the last composed step as launched, and continues as if it were computed.
        O(rows)."""
        used_up = self._flight.launch(batch)
        if used_up and self._static.current.ends_known_ahead:
            self._kv.bump_version()
        self.composer.advance_steady_batch(batch)

    def commit(
        self,
        batch: StepBatch,
        sampled: list[int],
        timings: list[StepTiming],
        logprobs: Mapping[int, TokenLogprobs] | None = None,
        scores: Iterable[PromptLogprobs] = (),
    ) -> StepResult:
        """Stores the drawn tokens: `sampled` has one for each of `batch.draws`, `logprobs` are by
        its index, `scores` are those of `batch.scored`. `timings` are of steps with a time
        known by now. Returns the tokens to send, without invalid ones, those of requests that left
        during the step, and the last tokens of static batches that are not over."""
        if not self._flight:
            self.advance(batch)
        self._flight.land(batch, scores)
        batching = self._static.current
        self._kv.publish_all(batch.chunks)
        sampling = batch.sampling
        rows = zip(range(len(sampling)), sampling, islice(sampled, len(sampling)), strict=True)
        tokens = [
            self.commit_draw(batching, sequence, token, logprobs.get(row) if logprobs else None)
            for row, sequence, token in batching.accept_draws(rows)
            if sequence.sampling_row >= 0
        ]
        tokens = batching.release_tokens(batch.chunks, tokens)
        tokens += self._accept_drafts(batching, batch, sampled, logprobs or {})
        if not batching.ends_known_ahead:
            self._ends.settle_batches()
            tokens += self._ends.pop_late()
        if self._suspects:
            self._suspects.pass_part()
            self._kv.bump_version()
        self.composer.commit_steady_batch(batch, sampled)
        return StepResult(tokens, timings, self._reporter.record_step(timings))

    def _accept_drafts(
        self,
        batching: Batching,
        batch: StepBatch,
        sampled: list[int],
        logprobs: Mapping[int, TokenLogprobs],
    ) -> list[NewToken]:
        """Stores the tokens drawn behind accepted drafts, up to the end of the request or of its
        budget. Returns them."""
        row, tokens, accepted = len(batch.sampling), list[NewToken](), list[int]()
        for chunk in batch.drafted:
            before = len(tokens)
            for number, draft in enumerate(chunk.drafts, row):
                if not self._accepts(chunk, draft):
                    break
                sequence, token = chunk.sequence, sampled[number]
                sequence.advance(number)
                tokens.append(self.commit_draw(batching, sequence, token, logprobs.get(number)))
            accepted.append(len(tokens) - before)
            row += len(chunk.drafts)
        self._speculation.record(batch, accepted)
        self._release_drafts(batch)
        self._reporter.tokens_per_step = self._speculation.tokens_per_step
        return tokens

    def _accepts(self, chunk: PrefillChunk, draft: int) -> bool:
        """Whether the request continues, and has drawn this token as its newest."""
        sequence = chunk.sequence
        runs = self._kv.running.get(sequence.request_id) is sequence
        return runs and sequence.within_budget and sequence.tokens[-1] == draft

    def _release_drafts(self, batch: StepBatch) -> None:
        here = [chunk for chunk in batch.drafted if self._kv.is_here(chunk.sequence)]
        self._speculation.release(here)

    def commit_draw(
        self, batching: Batching, sequence: Sequence, token: int, logprobs: TokenLogprobs | None
    ) -> NewToken:
        """Stores a drawn token, with the end of the request or of its budget if it is that."""
        length = sequence.set_drawn(token)
        if sequence.computed % self._limits.block_tokens == 0:
            self._kv.publish(sequence)
        finish = sequence.finish_reason(token, self._limits.eos_ids)
        if finish:
            if not batching.end(sequence, finish):
                self._ends.finish(sequence, finish)
        elif sequence.phase is not SequencePhase.RUNNING or not sequence.within_budget:
            if not batching.on_budget_changed(sequence):
                self._reporter.include(sequence)
            if not batching.ends_known_ahead:
                self._kv.bump_version()
        prompt, offset = sequence.prompt, length - 1 - sequence.prompt_tokens
        opening = None if sequence.opened else sequence.open()
        return NewToken(prompt.origin, prompt.request_id, offset, token, finish, logprobs, opening)

    def fail(self, batch: StepBatch) -> list[Sequence]:
        """Undoes a failed step, and a step launched after it. The only request of a step ends with
        ERROR and is returned. Several are computed in halves from now on, without their padding. A
        member that had ended is not computed any more; its end is sent when its static batch is
        over."""
        self._unwind()
        self._release_drafts(batch)
        rows = [s for s in batch.sequences if self._kv.is_here(s)]
        self._kv.bump_version()
        for chunk in self._static.padding_in(batch.chunks):
            self._static.leave_out(chunk.sequence)
        if len(batch.sequences) > 1:  # one of them may have gone meanwhile
            self._suspects.split(rows)
            return []
        self._suspects.pass_part()
        for sequence in rows:
            if sequence.ended:
                self._kv.stop_computing(sequence)
            else:
                self._ends.finish(sequence, FinishReason.ERROR)
        self._ends.settle_batches()
        return [s for s in rows if not s.ended]

    def out_of_memory(self, batch: StepBatch) -> bool:
        """Undoes a step for which the device has no memory, and evicts one request. False if the
        step has only one request, which would need the same memory again."""
        self._unwind()
        self._release_drafts(batch)
        rows = [
            s for s in batch.sequences if self._kv.running.get(s.request_id) is s and not s.ended
        ]
        self._kv.bump_version()
        return self._evictor.evict_newest(rows)

    def _unwind(self) -> None:
        for sequence in self._flight.unwind():
            self._reporter.record_eviction(sequence)

    def check_integrity(self) -> None:
        """Every unknown token is drawn by the step in flight; slots of adapters agree. Raises
        AssertionError."""
        self._flight.check_integrity()
        self.adapter_slots.check_integrity()

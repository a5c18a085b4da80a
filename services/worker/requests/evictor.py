"""Evictor: moves KV off the device when memory runs out, by the residency policy of the last
plan."""

from collections.abc import Iterable, Iterator
from math import inf

from services.core import Plan, Residency
from services.worker.kv.residency import (
    DEFAULT,
    RESIDENCIES,
    PoolRoom,
    Resident,
    plan_residency,
)
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.reporting import Reporter
from services.worker.requests.static_batching import StaticBatching
from services.worker.requests.types.sequence import Sequence, SequencePhase

# Growth of a request that a prefetch reserves; the next plan arrives before it is used up.
AHEAD_TOKENS = 32


class Evictor:
    """Applies the plan's residency policy to the KV, and reports evictions."""

    def __init__(self, kv: KVManager, reporter: Reporter, static: StaticBatching):
        self._kv = kv
        self._reporter = reporter
        self._static = static
        self._plan = Plan(0)
        self._eviction = RESIDENCIES[DEFAULT]

    def apply_plan_order(self, plan: Plan) -> None:
        """Adopts a plan's residency policy, order and victims; the default policy for an unknown
        name."""
        eviction = RESIDENCIES.get(plan.residency, RESIDENCIES[DEFAULT])
        if eviction is not self._eviction:
            self._eviction = eviction
            self._kv.bump_version()  # requests that wait for memory may get it
        self._plan = plan
        if plan.order and self._kv.may_move:
            room = PoolRoom(
                self._kv.pool.blocks, self._kv.host.free_blocks * self._kv.host.block_tokens
            )
            transfers = plan_residency(self._residents(), room, plan.costs, self._eviction)
            for request_id in transfers.offload:
                self._kv.release_device(self._kv.sequences[request_id], Residency.OFFLOAD)
            for request_id in transfers.prefetch:
                self.prefetch(request_id)

    def _residents(self) -> Iterator[Resident]:
        for request_id, wait_s in self._plan.order:
            if sequence := self._kv.sequences.get(request_id):
                yield self._resident(sequence, wait_s)

    def _resident(self, sequence: Sequence, wait_s: float) -> Resident:
        pool = self._kv.pool
        ahead = max(1, min(AHEAD_TOKENS, sequence.limit_length - len(sequence.tokens)))
        on_device = bool(pool.table(sequence.request_id))
        runs = sequence.phase is SequencePhase.RUNNING
        tokens = len(sequence.tokens) if runs else sequence.held_tokens
        return Resident(
            sequence.request_id,
            wait_s,
            runs,
            on_device,
            sequence.held_tokens,
            pool.blocks_for(tokens + ahead),
        )

    def prefetch(self, request_id: str) -> None:
        """Brings KV back ahead of need, if that evicts nothing."""
        sequence = self._kv.sequences.get(request_id)
        if sequence and sequence.host_tokens and not sequence.upload_serial:
            self._kv.upload(sequence)

    def may_evict(self, sequence: Sequence) -> bool:
        """Whether the policy allows to evict a request."""
        return self._choose_eviction(sequence) is not Residency.KEEP

    def evict(self, sequence: Sequence) -> bool:
        """Evicts a request at once; False if the policy does not allow it."""
        how = self._choose_eviction(sequence)
        if how is Residency.KEEP:
            return False
        self._evict(sequence, how)
        return True

    def _choose_eviction(self, sequence: Sequence) -> Residency:
        if sequence.host_tokens:
            return Residency.OFFLOAD  # its upload is pending, so its host copy still exists
        unknown_wait_s = inf
        return self._eviction(sequence.held_tokens, unknown_wait_s, self._plan.costs)

    def free_memory(self) -> bool:
        """Called when nothing can run for lack of memory: frees undelivered work, or drops the
        first victim under any policy; False if no request holds memory."""
        if self._static.current.free_memory():
            return True
        victim = next((s for s in self._eviction_order() if self._holds(s)), None)
        if victim is None:
            return False
        self._evict(victim, Residency.DROP)
        return True

    def evict_newest(self, rows: list[Sequence]) -> bool:
        """Called when the device had no memory for a step of these rows: frees undelivered work, or
        evicts the newest row under any policy; False if there is only one."""
        if self._static.current.free_memory():
            return True
        if len(rows) < 2:
            return False
        newest = max(rows, key=lambda s: s.serial)
        if not self.evict(newest):
            self._evict(newest, Residency.DROP)
        return True

    def _evict(self, sequence: Sequence, how: Residency) -> None:
        self._static.remove_from_batch(sequence.request_id)
        self._kv.release_device(sequence, how)
        self._kv.counters.evicted_offloaded += sequence.host_tokens > 0
        self._kv.counters.evicted_dropped += not sequence.host_tokens
        self._reporter.record_eviction(sequence)

    def victims_for(self, sequence: Sequence, decoding: bool) -> Iterator[Sequence]:
        """Candidates for eviction in order: paused requests, the last of the plan's order first;
        then running ones, in the plan's victim order; then the newest first.

        A decode may evict any request, including itself; a prefill may evict later requests and
        paused ones.
        """
        for candidate in self._eviction_order():
            behind = candidate.phase is SequencePhase.PAUSED or candidate.serial > sequence.serial
            if self._holds(candidate) and (decoding or behind):
                yield candidate

    def _holds(self, sequence: Sequence) -> bool:
        return bool(self._kv.pool.table(sequence.request_id))

    def _eviction_order(self) -> Iterator[Sequence]:
        newest_first = sorted(self._kv.sequences.values(), key=lambda s: -s.serial)
        ranked = reversed(self._plan.order.request_ids)
        yield from self._named(ranked, SequencePhase.PAUSED)
        yield from (s for s in newest_first if s.phase is SequencePhase.PAUSED)
        yield from self._named(self._plan.victims, SequencePhase.RUNNING)
        yield from (s for s in newest_first if s.phase is SequencePhase.RUNNING)

    def _named(self, request_ids: Iterable[str], phase: SequencePhase) -> Iterator[Sequence]:
        for request_id in request_ids:
            sequence = self._kv.sequences.get(request_id)
            if sequence and sequence.phase is phase:
                yield sequence

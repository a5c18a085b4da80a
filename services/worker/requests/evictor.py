"""Evictor: which requests leave the device when memory runs out, and how, as the last plan
orders."""

from collections.abc import Iterable, Iterator

from services.core import Plan, Residency
from services.worker.kv.residency import (
    DEFAULT,
    RESIDENCIES,
    PoolRoom,
    ResidencyPlan,
    Resident,
    choose_eviction,
    plan_residency,
)
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.reporting import Reporter
from services.worker.requests.static_batching import StaticBatching
from services.worker.requests.types.sequence import Phase, Sequence

# of a request's growth, kept free for a prefetch: a plan comes before they are generated
AHEAD_TOKENS = 32


class Evictor:
    """Applies the plan's residency policy to the KV, and reports evictions."""

    def __init__(self, kv: KVManager, reporter: Reporter, static: StaticBatching):
        self._kv = kv
        self._reporter = reporter
        self._static = static
        self._plan = Plan(0)
        self._leave = RESIDENCIES[DEFAULT]

    def planned(self, plan: Plan) -> None:
        """Follows this plan from now on; the default policy if it names an unknown one."""
        leave = RESIDENCIES.get(plan.residency, RESIDENCIES[DEFAULT])
        if leave is not self._leave:
            self._leave = leave
            self._kv.touch()  # requests that wait for memory may get it now
        self._plan = plan
        if plan.order:
            pools = self._kv
            room = PoolRoom(pools.pool.blocks, pools.host.free_tokens)
            self._carry_out(plan_residency(self._residents(), room, plan.costs, self._leave))

    def _residents(self) -> Iterator[Resident]:
        for standing in self._plan.order:
            if sequence := self._kv.sequences.get(standing.request_id):
                yield self._resident(sequence, standing.wait_s)

    def _resident(self, sequence: Sequence, wait_s: float) -> Resident:
        pool = self._kv.pool
        ahead = max(1, min(AHEAD_TOKENS, sequence.limit_length - len(sequence.tokens)))
        on_device = bool(pool.table(sequence.request_id))
        runs = sequence.phase is Phase.RUNNING
        tokens = len(sequence.tokens) if runs else sequence.held_tokens
        return Resident(
            sequence.request_id,
            wait_s,
            runs,
            on_device,
            sequence.held_tokens,
            pool.blocks_for(tokens + ahead),
        )

    def _carry_out(self, placing: ResidencyPlan) -> None:
        for request_id in placing.offload:
            self._kv.leave(self._kv.sequences[request_id], Residency.OFFLOAD)
        for request_id in placing.prefetch:
            self.prefetch(request_id)

    def prefetch(self, request_id: str) -> None:
        """Brings KV back ahead of need, if that evicts nothing."""
        sequence = self._kv.sequences.get(request_id)
        if sequence and sequence.resting and not sequence.arriving:
            self._kv.bring_back(sequence)

    def may_leave(self, sequence: Sequence) -> bool:
        """Whether the policy allows its eviction."""
        return self._way_out(sequence) is not Residency.KEEP

    def evict(self, sequence: Sequence) -> bool:
        """Evicts it at once; False if the policy evicts nothing."""
        how = self._way_out(sequence)
        if how is Residency.KEEP:
            return False
        self._evict(sequence, how)
        return True

    def _way_out(self, sequence: Sequence) -> Residency:
        if sequence.resting:
            return Residency.OFFLOAD  # it was returning, and its host copy still exists
        return choose_eviction(sequence.held_tokens, self._plan.costs, self._leave)

    def give_way(self) -> bool:
        """Called when nothing can run for lack of memory: frees undelivered work, or evicts the
        first victim, whatever the policy; False if no request holds memory."""
        if self._static.current.give_way():
            return True
        victim = next((s for s in self._eviction_order() if self._holds(s)), None)
        if victim is None:
            return False
        self._evict(victim, Residency.DROP)
        return True

    def relieve(self, rows: list[Sequence]) -> bool:
        """A step of these rows had no memory to compute in: frees undelivered work, or evicts the
        newest of them, whatever the policy; False if there is only one."""
        if self._static.current.give_way():
            return True
        if len(rows) < 2:
            return False
        newest = max(rows, key=lambda s: s.serial)
        if not self.evict(newest):
            self._evict(newest, Residency.DROP)
        return True

    def _evict(self, sequence: Sequence, how: Residency) -> None:
        self._static.leave(sequence.request_id)
        self._kv.leave(sequence, how)
        self._kv.counters.evicted_offloaded += sequence.resting > 0
        self._kv.counters.evicted_dropped += not sequence.resting
        self._reporter.evicted(sequence)

    def victims_for(self, sequence: Sequence, decoding: bool) -> Iterator[Sequence]:
        """Candidates for eviction in order: paused requests, the last of the plan's order first;
        running ones, in the plan's victim order; then the newest.

        A decode may evict any request, itself included; a prefill may evict later ones and paused
        ones.
        """
        for holder in self._eviction_order():
            behind = holder.phase is Phase.PAUSED or holder.serial > sequence.serial
            if self._holds(holder) and (decoding or behind):
                yield holder

    def _holds(self, sequence: Sequence) -> bool:
        return bool(self._kv.pool.table(sequence.request_id))

    def _eviction_order(self) -> Iterator[Sequence]:
        newest_first = sorted(self._kv.sequences.values(), key=lambda s: -s.serial)
        ranked = [s.request_id for s in reversed(self._plan.order)]
        yield from self._named(ranked, Phase.PAUSED)
        yield from (s for s in newest_first if s.phase is Phase.PAUSED)
        yield from self._named(self._plan.victims, Phase.RUNNING)
        yield from (s for s in newest_first if s.phase is Phase.RUNNING)

    def _named(self, request_ids: Iterable[str], phase: Phase) -> Iterator[Sequence]:
        for request_id in request_ids:
            sequence = self._kv.sequences.get(request_id)
            if sequence and sequence.phase is phase:
                yield sequence

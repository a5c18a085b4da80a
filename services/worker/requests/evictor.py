"""Evictor: who leaves the device when its memory is out, and how; as the last plan orders."""

from collections.abc import Iterable, Iterator

from services.core import Plan, Residency
from services.worker.kv.residency import DEFAULT, RESIDENCIES, Placing, Resident, Room, evict, place
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.lockstep import Lockstep
from services.worker.requests.reporting import Reporter
from services.worker.requests.sequence import Phase, Sequence

AHEAD_TOKENS = 32  # of a request's growth, kept free for it: a plan comes well before they are made


class Evictor:
    """Carries the plan's residency policy out on the kv, and reports who left."""

    def __init__(self, kv: KVManager, reporter: Reporter, lockstep: Lockstep):
        self._kv = kv
        self._reporter = reporter
        self._lockstep = lockstep
        self._plan = Plan(0)
        self._leave = RESIDENCIES[DEFAULT]

    def planned(self, plan: Plan) -> None:
        """Follow this plan from now on; by the default, where its policy is unknown here."""
        leave = RESIDENCIES.get(plan.residency, RESIDENCIES[DEFAULT])
        if leave is not self._leave:
            self._leave = leave
            self._kv.touch()  # who waits for memory may get it now
        self._plan = plan
        if plan.order:
            pools = self._kv
            room = Room(pools.pool.blocks, pools.host.free_tokens)
            self._carry_out(place(self._residents(), room, plan.costs, self._leave))

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

    def _carry_out(self, placing: Placing) -> None:
        for request_id in placing.offload:
            self._kv.leave(self._kv.sequences[request_id], Residency.OFFLOAD)
        for request_id in placing.prefetch:
            self.prefetch(request_id)

    def prefetch(self, request_id: str) -> None:
        """Bring KV back ahead of need, if nobody has to leave for it."""
        sequence = self._kv.sequences.get(request_id)
        if sequence and sequence.resting and not sequence.arriving:
            self._kv.bring_back(sequence)

    def may_leave(self, sequence: Sequence) -> bool:
        """Whether the policy lets it be evicted."""
        return self._way_out(sequence) is not Residency.KEEP

    def evict(self, sequence: Sequence) -> bool:
        """Make it leave at once; False where the policy lets nobody leave."""
        how = self._way_out(sequence)
        if how is Residency.KEEP:
            return False
        self._evict(sequence, how)
        return True

    def _way_out(self, sequence: Sequence) -> Residency:
        if sequence.resting:
            return Residency.OFFLOAD  # it was on its way back, and rests still
        return evict(sequence.held_tokens, self._plan.costs, self._leave)

    def give_way(self) -> bool:
        """When nothing can run for want of memory: what nobody reads goes, or the first victim
        leaves, whatever the policy; False if nobody holds any."""
        if self._lockstep.active and self._lockstep.give_way():
            return True
        victim = next((s for s in self._eviction_order() if self._holds(s)), None)
        if victim is None:
            return False
        self._evict(victim, Residency.DROP)
        return True

    def relieve(self, rows: list[Sequence]) -> bool:
        """A step of these found no memory to be computed in: what nobody reads goes, or the newest
        of them leaves, whatever the policy; False where there is only one."""
        if self._lockstep.active and self._lockstep.give_way():
            return True
        if len(rows) < 2:
            return False
        newest = max(rows, key=lambda s: s.serial)
        if not self.evict(newest):
            self._evict(newest, Residency.DROP)
        return True

    def _evict(self, sequence: Sequence, how: Residency) -> None:
        self._lockstep.leave(sequence.request_id)
        self._kv.leave(sequence, how)
        self._kv.counters.evicted_offloaded += sequence.resting > 0
        self._kv.counters.evicted_dropped += not sequence.resting
        self._reporter.evicted(sequence)

    def victims_for(self, sequence: Sequence, decoding: bool) -> Iterator[Sequence]:
        """Who may be evicted for it, first to last: the paused, the last in the plan's order
        before others; then those that run, as the plan orders victims; then the newest.

        A decode may evict anybody, itself included; a prefill those admitted after it, and
        paused ones.
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

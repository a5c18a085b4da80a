"""Holdings: who is at this worker, in which phase, and with which blocks."""

from collections.abc import Iterator

from services.worker.blocks import BlockPool
from services.worker.prompt import Prompt
from services.worker.sequence import Phase, Sequence


class Holdings:
    """All sequences and blocks of one replica. `version` grows whenever who may run changes."""

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.sequences: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}  # phase RUNNING, in order of admission
        self.victims: tuple[str, ...] = ()  # as the plan orders
        self.evicted: list[Sequence] = []  # not reported yet
        self.version = 0
        self._serial = 0

    def start(self, prompt: Prompt, limit_tokens: int) -> None:
        sequence = Sequence.start(prompt, limit_tokens)
        self.sequences[prompt.request_id] = sequence
        self.run(sequence)

    def run(self, sequence: Sequence) -> None:
        """Admit, or admit again: it is now the newest."""
        self._serial += 1
        sequence.serial = self._serial
        sequence.phase = Phase.RUNNING
        self.running[sequence.request_id] = sequence
        self.version += 1

    def pause(self, sequence: Sequence) -> None:
        """Out of the running, its blocks kept."""
        del self.running[sequence.request_id]
        sequence.phase = Phase.PAUSED
        self.version += 1

    def park(self, sequence: Sequence) -> None:
        """Take its blocks; its tokens stay."""
        self.running.pop(sequence.request_id, None)
        self.pool.release(sequence.request_id)
        sequence.computed = 0
        sequence.phase = Phase.PARKED
        self.version += 1

    def evict(self, sequence: Sequence) -> None:
        self.park(sequence)
        self.evicted.append(sequence)

    def forget(self, request_id: str) -> None:
        """Free everything of a request; an unknown one is fine."""
        if self.sequences.pop(request_id, None):
            self.running.pop(request_id, None)
            self.pool.release(request_id)
            self.version += 1

    def set_limit(self, sequence: Sequence, limit_tokens: int) -> None:
        """Its budget from now on."""
        before = sequence.within_budget
        sequence.limit_length = sequence.prompt_tokens + limit_tokens
        if sequence.within_budget != before:
            self.version += 1

    def touch(self) -> None:
        """Who may run has changed."""
        self.version += 1

    def victims_for(self, sequence: Sequence, decoding: bool) -> Iterator[Sequence]:
        """Who may be evicted for it, first to last: as the plan orders, then paused, then newest.

        A decode may evict anybody, itself included; a prefill those admitted after it, and
        paused ones.
        """
        for holder in self._eviction_order():
            behind = holder.phase is Phase.PAUSED or holder.serial > sequence.serial
            if self.pool.table(holder.request_id) and (decoding or behind):
                yield holder

    def _eviction_order(self) -> Iterator[Sequence]:
        for request_id in self.victims:
            if request_id in self.sequences:
                yield self.sequences[request_id]
        newest_first = sorted(self.sequences.values(), key=lambda s: -s.serial)
        yield from (s for s in newest_first if s.phase is Phase.PAUSED)
        yield from (s for s in newest_first if s.phase is Phase.RUNNING)

    def check_integrity(self) -> None:
        """Blocks and phases agree with each other. Raises AssertionError."""
        self.pool.check_integrity()
        holders = {k for k, s in self.sequences.items() if s.phase is not Phase.PARKED}
        assert set(self.pool.owners()) <= holders, "blocks of a request that holds none"
        serials = [s.serial for s in self.running.values()]
        assert serials == sorted(serials), "running is not in order of admission"
        for request_id, sequence in self.sequences.items():
            assert (sequence.phase is Phase.RUNNING) == (request_id in self.running)
            assert 0 <= sequence.computed < len(sequence.tokens) < sequence.max_length
            room = len(self.pool.table(request_id)) * self.pool.block_tokens
            assert sequence.computed <= room, "KV without a block"

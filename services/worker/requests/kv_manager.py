"""KVManager: the requests of this worker, their phases, and the location of their KV.

It owns the blocks of both pools. An offload frees device blocks, and an upload takes them, at once.
The copies follow in the order of `pop_moves`, before the step is computed.
"""

from collections.abc import Iterable
from itertools import chain

from services.core import Residency
from services.costs import Direction
from services.runtime.prefix import extend_keys, key_salt
from services.worker.kv.blocks import BlockPool
from services.worker.kv.prefixes import StoredBlocks
from services.worker.kv.transfers import KVTransfer, TransferPlan
from services.worker.requests.types.batch import PrefillChunk
from services.worker.requests.types.limits import Counters
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import UNKNOWN, Sequence, SequencePhase


class KVManager:
    """All sequences and blocks of one replica. `version` changes whenever the set of runnable
    requests may have changed."""

    def __init__(
        self,
        pool: BlockPool,
        host: BlockPool,
        counters: Counters,
        sharing: bool = True,
        exact_swaps: bool = True,
    ):
        self.pool = pool
        self.host = host
        self.counters = counters
        self.sequences: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}  # phase RUNNING, in order of admission
        self.pads: dict[str, Sequence] = {}  # padding of static batches, by the padded member
        self.version = 0
        self.limits_version = 0  # changes whenever a budget may have changed
        self.sharing = sharing
        self._exact_swaps = exact_swaps
        self._admissions = 0
        self._moves = 0  # serial of the last move
        self._started: list[KVTransfer] = []
        self._recalled: list[int] = []
        self._uploading: dict[int, Sequence] = {}

    def is_here(self, sequence: Sequence) -> bool:
        """Whether this sequence is still here; another one may have its id."""
        return self.sequences.get(sequence.request_id) is sequence

    @property
    def may_move(self) -> bool:
        """Whether some KV could be moved between the pools: a request does not run, or has KV in
        host memory."""
        return len(self.running) < len(self.sequences) or self.host.owner_count > 0

    # Phases

    def start(self, prompt: Prompt, limit_tokens: int) -> None:
        sequence = Sequence.start(prompt, limit_tokens)
        self.sequences[prompt.request_id] = sequence
        self.run(sequence)

    def park(self, prompt: Prompt) -> None:
        """Keeps a prompt without a budget until it is admitted."""
        sequence = Sequence.start(prompt, prompt.delivered_tokens)
        self.sequences[prompt.request_id] = sequence
        sequence.phase = SequencePhase.PARKED

    def run(self, sequence: Sequence) -> None:
        """Admits a request, or admits it again, as the newest."""
        self._admissions += 1
        sequence.serial = self._admissions
        sequence.phase = SequencePhase.RUNNING
        self.running[sequence.request_id] = sequence
        self.version += 1

    def pause(self, sequence: Sequence) -> None:
        """Stops a request from running, and keeps its KV where it is."""
        del self.running[sequence.request_id]
        rests = sequence.host_tokens and not sequence.upload_serial
        sequence.phase = SequencePhase.PARKED if rests else SequencePhase.PAUSED
        self.version += 1

    def forget(self, request_id: str) -> None:
        """Frees everything of a request; ignores an unknown one.

        Its blocks can be reused at once, although a step in flight may still write to them: the
        operations of a new owner are issued later on the same stream, and the step writes behind
        all published blocks.
        """
        if sequence := self.sequences.pop(request_id, None):
            self.running.pop(request_id, None)
            if sequence.sampling_row >= 0:
                sequence.sampling_row = -1  # its draw is discarded
                self.counters.stray_rows += 1
            self._recall(sequence)
            self.pool.release(request_id)
            self.host.release(request_id)
            self.version += 1

    def set_limit(self, sequence: Sequence, limit_tokens: int) -> None:
        """Sets a request's budget."""
        before = sequence.within_budget
        sequence.limit_length = sequence.prompt_tokens + limit_tokens
        self.limits_version += 1
        if sequence.within_budget != before:
            self.version += 1

    def bump_version(self) -> None:
        """Records that the set of runnable requests may have changed."""
        self.version += 1

    def stop_computing(self, sequence: Sequence) -> None:
        """Stops computing a running request, and frees its KV and budget."""
        self.pool.release(sequence.request_id)
        sequence.computed = sequence.published = sequence.limit_length = 0
        self.limits_version += 1
        self.version += 1

    def unwind(self, sequence: Sequence, computed: int) -> Sequence | None:
        """Undoes a failed step: only the KV of the first `computed` tokens is valid, in either
        pool. Returns the request if it lost all its KV and does not run.

        Blocks that other requests computed remain valid, because they are published.
        """
        if sequence.host_tokens:
            return self.drop_lost_kv(sequence.request_id)
        size = self.pool.block_tokens
        if not sequence.exact:
            computed -= computed % size  # a quantized block is valid only as a whole
        sequence.computed = max(min(sequence.computed, computed), sequence.published * size)
        self.version += 1
        return None

    def blocks(self) -> dict[str, int]:
        """Device blocks of each request, including its padding's and shared ones. O(holders)."""
        blocks = self.pool.held()
        for request_id, pad in self.pads.items():
            if own := blocks.pop(pad.request_id, 0):
                blocks[request_id] = blocks.get(request_id, 0) + own
        return blocks

    # Offloads and uploads

    def release_device(self, sequence: Sequence, how: Residency) -> None:
        """Frees a request's device blocks; with OFFLOAD its KV moves to host memory, if there is
        room."""
        self.running.pop(sequence.request_id, None)
        self.version += 1
        self._recall(sequence)
        if how is not Residency.OFFLOAD or not (sequence.host_tokens or self._offload(sequence)):
            self._drop(sequence, host_full=how is Residency.OFFLOAD)
        self.pool.release(sequence.request_id)
        sequence.computed = sequence.published = 0
        sequence.phase = SequencePhase.PARKED

    def _drop(self, sequence: Sequence, host_full: bool) -> None:
        if sequence.held_tokens:
            self.counters.dropped += 1
            self.counters.host_full += host_full
        self.host.release(sequence.request_id)
        sequence.host_tokens = 0
        sequence.exact = True

    def _offload(self, sequence: Sequence) -> bool:
        if not sequence.computed or not self.host.grow(sequence.request_id, sequence.computed):
            return False
        self._move(sequence, Direction.OFFLOAD, 0, sequence.computed)
        self.counters.offloads += 1
        self.counters.offloaded_tokens += sequence.computed
        sequence.host_tokens = sequence.computed
        sequence.exact &= self._exact_swaps
        return True

    def upload(self, sequence: Sequence) -> bool:
        """Begins the upload of KV from host memory, with room for the next token; False, with no
        effect, if memory runs out."""
        if self.pool.blocks_for(len(sequence.tokens)) > self.pool.free_blocks:
            return False
        shared = self._share(sequence, sequence.host_tokens // self.pool.block_tokens)
        self.pool.grow(sequence.request_id, len(sequence.tokens))
        sequence.published = shared
        sequence.upload_serial = self._move(
            sequence, Direction.UPLOAD, shared, sequence.host_tokens
        )
        self._uploading[sequence.upload_serial] = sequence
        if sequence.phase is SequencePhase.PARKED:
            sequence.phase = SequencePhase.PAUSED
        self.version += 1
        return True

    def complete_upload(self, serial: int) -> None:
        """Completes an upload; ignores one that was recalled meanwhile."""
        sequence = self._uploading.pop(serial, None)
        if sequence is None:
            return
        self.counters.uploads += 1
        self.counters.uploaded_tokens += sequence.host_tokens
        self.host.release(sequence.request_id)
        sequence.computed, sequence.host_tokens, sequence.upload_serial = sequence.host_tokens, 0, 0
        self.version += 1

    def drop_lost_kv(self, request_id: str) -> Sequence | None:
        """Drops KV that could not be stored in host memory; it is recomputed. Returns the request
        if it does not run; a running one restarts without a report."""
        sequence = self.sequences.get(request_id)
        if sequence is None or not sequence.host_tokens:
            return None
        self._recall(sequence)
        self.pool.release(request_id)
        self._drop(sequence, host_full=True)
        sequence.published = 0
        self.version += 1
        if sequence.phase is SequencePhase.RUNNING:
            return None
        sequence.phase = SequencePhase.PARKED
        return sequence

    def _recall(self, sequence: Sequence) -> None:
        if sequence.upload_serial:
            del self._uploading[sequence.upload_serial]
            self._recalled.append(sequence.upload_serial)
            sequence.upload_serial = 0

    def _move(self, sequence: Sequence, direction: Direction, first: int, tokens: int) -> int:
        """Orders a copy of the blocks from `first` on that hold `tokens`; returns its serial."""
        self._moves += 1
        request_id, last = sequence.request_id, self.pool.blocks_for(tokens)
        move = KVTransfer(
            self._moves,
            request_id,
            direction,
            tuple(self.pool.table(request_id)[first:last]),
            tuple(self.host.table(request_id)[first:last]),
            tokens - first * self.pool.block_tokens,
        )
        self._started.append(move)
        return self._moves

    def pop_moves(self) -> TransferPlan:
        """The copies ordered since the last call, in order."""
        moves = TransferPlan(tuple(self._started), tuple(self._recalled))
        self._started.clear()
        self._recalled.clear()
        return moves

    # Shared prefixes

    def adopt_prefix(self, sequence: Sequence) -> None:
        """Adopts cached blocks of a request's beginning; leaves one token or more to compute."""
        if not self._may_adopt(sequence):
            return
        blocks = self._share(sequence, (len(sequence.tokens) - 1) // self.pool.block_tokens)
        sequence.published = blocks
        sequence.computed = blocks * self.pool.block_tokens
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_tokens)
        self.counters.prefix_asked_tokens += len(sequence.tokens)
        self.counters.prefix_hit_tokens += sequence.computed

    def can_wait(
        self, sequence: Sequence, earlier: Iterable[Sequence], in_flight: Iterable[Sequence] = ()
    ) -> bool:
        """Whether a request prefilled in this step (`earlier`) or in the one in flight computes
        half or more of the blocks that this request lacks, so that it adopts them later. A prompt
        of a single such block does not wait. O(requests)."""
        if not self._may_adopt(sequence):
            return False
        size, length = self.pool.block_tokens, len(sequence.tokens)
        keys = self._keys_of(sequence, (length - 1) // size)
        first = self.pool.known(keys)
        left = length - first * size
        last = first + -(-left // (2 * size))  # the blocks that justify a wait
        if len(keys) < max(2, last):
            return False
        computed = (s for s in in_flight if s.computed >= last * size and self.is_here(s))
        return any(
            other.exact
            and other.published <= first  # it will publish the blocks after these
            and other.keys[last - 1 : last] == keys[last - 1 : last]
            for other in chain(earlier, computed)
        )

    def publish_all(self, chunks: Iterable[PrefillChunk]) -> None:
        """Publishes the computed blocks of requests that are still here."""
        for chunk in chunks:
            if self.is_here(chunk.sequence):
                self.publish(chunk.sequence)

    def publish(self, sequence: Sequence) -> None:
        """Publishes the blocks that a request has filled."""
        full = sequence.computed // self.pool.block_tokens
        if full == sequence.published or not (self.sharing and sequence.exact):
            return
        keys, pool = self._keys_of(sequence, full), self.pool
        new = [
            index
            for index in range(sequence.published, full)
            if pool.publish(sequence.request_id, index, keys[index])
        ]
        if new and pool.listener:
            salt, adapter = sequence.prompt.cache_salt, sequence.prompt.adapter
            pool.listener.stored(StoredBlocks(new, keys, sequence.tokens, salt, adapter))
        sequence.published = full

    def _share(self, sequence: Sequence, blocks: int) -> int:
        if not self.sharing:
            return 0
        return self.pool.share(sequence.request_id, self._keys_of(sequence, blocks))

    def _may_adopt(self, sequence: Sequence) -> bool:
        """Whether a request has no KV on the device, and needs no logits of cached tokens."""
        has = sequence.computed or self.pool.table(sequence.request_id)
        return self.sharing and not has and sequence.scores is None

    def _keys_of(self, sequence: Sequence, blocks: int) -> list[bytes]:
        """Keys of a request's first full blocks; each is hashed once."""
        salt = key_salt(sequence.prompt.cache_salt, sequence.prompt.adapter)
        extend_keys(sequence.keys, sequence.tokens, blocks, self.pool.block_tokens, salt)
        return sequence.keys[:blocks]

    # Integrity

    def check_integrity(self) -> None:
        """Blocks, phases and moves agree. Raises AssertionError."""
        self.pool.check_integrity()
        self.host.check_integrity()
        serials = [s.serial for s in self.running.values()]
        assert serials == sorted(serials), "running is not in order of admission"
        assert self._uploading == {
            s.upload_serial: s for s in self.sequences.values() if s.upload_serial
        }
        for request_id, sequence in self.sequences.items():
            self._check(sequence)
            assert (sequence.phase is SequencePhase.RUNNING) == (request_id in self.running)
        pads = {pad.request_id for pad in self.pads.values()}
        for owner in (*self.pool.owners(), *self.host.owners()):
            assert owner in self.sequences or owner in pads, "blocks of an absent request"
        assert self.pads.keys() <= self.running.keys(), "padding of a request that does not run"

    def _check(self, sequence: Sequence) -> None:
        request_id = sequence.request_id
        device, host = self.pool.table(request_id), self.host.table(request_id)
        kept = max(sequence.computed, sequence.host_tokens)
        draws = sequence.sampling_row >= 0
        assert 0 <= kept < len(sequence.tokens) < sequence.max_length + draws
        assert (sequence.tokens[-1] == UNKNOWN) == draws, "a token is unknown, and none is drawn"
        assert UNKNOWN not in sequence.tokens[-3:-1], "two tokens are unknown"
        assert not (sequence.computed and sequence.host_tokens), "KV in both pools"
        assert bool(sequence.host_tokens) == bool(host), (
            "host blocks without KV, or KV without host blocks"
        )
        assert not (sequence.phase is SequencePhase.PARKED and device), "parked with device blocks"
        assert not (sequence.host_tokens and device) or sequence.upload_serial
        assert sequence.published <= len(device)
        assert sequence.computed <= len(device) * self.pool.block_tokens, "KV without a block"
        assert sequence.host_tokens <= len(host) * self.host.block_tokens, "KV without a block"

"""Random calls of a block pool, with an integrity check after each."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.worker.kv.blocks import BlockPool
from tests.examples import examples

BLOCK, BLOCKS = 4, 9
IDS = st.sampled_from([f"r{i}" for i in range(8)])


class BlockMachine(RuleBasedStateMachine):
    """BlockPool against tables kept as lists, and contents by block. The text of an owner is its
    letter, then digits; owners with texts that begin alike may share blocks."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK)
        self.held: dict[str, list[int]] = {}
        self.published: dict[
            str, int
        ] = {}  # by owner: the number of its first blocks that are published
        self.content: dict[
            int, bytes
        ] = {}  # contents of published blocks, until they are overwritten

    @staticmethod
    def keys(owner: str, blocks: int) -> list[bytes]:
        """Keys of a text. Owners with equal numbers modulo 3 have the same text. No key is all
        zeros, which is the hash for no block."""
        return [bytes([1 + int(owner[1:]) % 3, i]) for i in range(blocks)]

    def free(self) -> int:
        return BLOCKS - len({block for table in self.held.values() for block in table})

    @rule(owner=IDS, tokens=st.integers(1, 20))
    def grow(self, owner, tokens):
        table = list(self.held.get(owner, []))
        missing = max(0, -(-tokens // BLOCK) - len(table))
        others = {block for table in self.held.values() for block in table}
        assert self.pool.grow(owner, tokens) == (missing <= self.free())
        got = self.pool.table(owner)
        if missing > BLOCKS - len(others):
            assert got == table
            return
        assert got[: len(table)] == table and len(got) == len(table) + missing
        assert not set(got[len(table) :]) & others, "a held block was allocated again"
        for block in got[len(table) :]:
            self.content.pop(block, None)
        if got:
            self.held[owner] = list(got)

    @rule(owner=IDS)
    def release(self, owner):
        self.pool.release(owner)
        self.held.pop(owner, None)
        self.published.pop(owner, None)

    @rule(owner=IDS)
    def publish(self, owner):
        index = self.published.get(owner, 0)
        if index >= len(self.held.get(owner, [])):
            return
        key = self.keys(owner, index + 1)[index]
        self.pool.publish(owner, index, key)
        self.published[owner] = index + 1
        if key not in self.content.values():
            self.content[self.held[owner][index]] = key

    @rule(owner=IDS, blocks=st.integers(0, 5))
    def share(self, owner, blocks):
        if owner in self.held:
            return
        where = {key: block for block, key in self.content.items()}
        expected = []
        for key in self.keys(owner, blocks):
            if key not in where:
                break
            expected.append(where[key])
        assert self.pool.share(owner, self.keys(owner, blocks)) == len(expected)
        assert self.pool.table(owner) == expected
        if expected:
            self.held[owner], self.published[owner] = expected, len(expected)

    @invariant()
    def agrees(self):
        self.pool.check_integrity()
        assert {o: self.pool.table(o) for o in self.pool.owners()} == self.held
        assert self.pool.free_blocks == self.free()


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)

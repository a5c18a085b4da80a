"""DecodeRows: rows that skip steps equal rows that are built anew."""

import numpy as np

from services.worker.kv.blocks import BlockPool
from services.worker.requests.types.batch import DecodeRows
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence

BLOCK = 4


def decoding(name: str, length: int, pool: BlockPool) -> Sequence:
    sequence = Sequence.start(Prompt(name, list(range(length)), length, 100), 100)
    sequence.computed = length - 1
    pool.grow(name, length)
    return sequence


def skip(sequence: Sequence, steps: int, pool: BlockPool) -> None:
    sequence.tokens += [9] * steps
    sequence.computed += steps
    pool.grow(sequence.request_id, len(sequence.tokens))


def test_decode_rows_that_skip_steps_equal_rows_built_anew() -> None:
    pool = BlockPool(64, BLOCK)
    sequences = [decoding("a", 3, pool), decoding("b", 8, pool), decoding("c", 5, pool)]
    rows = DecodeRows(sequences, [pool.table(name) for name in "abc"], BLOCK)
    assert rows.slots.tolist() == anew(sequences, pool).slots.tolist()
    for steps in (1, 6):
        for sequence in sequences:
            skip(sequence, steps, pool)
        rows.skip(steps)
        for row in np.flatnonzero(rows.positions % BLOCK == 0).tolist():
            rows.set_block(row, pool.table(rows.sequences[row].request_id)[-1])
        fresh = anew(sequences, pool)
        assert rows.sequences == fresh.sequences
        for name in ("tokens", "positions", "slots"):
            assert getattr(rows, name).tolist() == getattr(fresh, name).tolist()
        blocks = -(-(rows.positions + 1) // BLOCK)
        for row, count in enumerate(blocks.tolist()):
            assert rows.tables[row, :count].tolist() == fresh.tables[row, :count].tolist()


def anew(sequences: list[Sequence], pool: BlockPool) -> DecodeRows:
    return DecodeRows(sequences, [pool.table(s.request_id) for s in sequences], BLOCK)

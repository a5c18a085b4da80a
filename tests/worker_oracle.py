"""A device too dumb to be wrong: it remembers who wrote which slot, and answers by rule."""

from zlib import crc32

from services.worker.batch import StepBatch
from services.worker.sequence import Sequence

EOS = 0


def answer(request_id: str, length: int) -> int:
    """The token at index `length` of this request; one in eight ends it."""
    return crc32(f"{request_id}:{length}".encode()) % 8


class DumbDevice:
    """Stores (request, position, token) by slot, and checks every context before answering."""

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self._memory: dict[int, tuple[str, int, int]] = {}

    def run(self, batch: StepBatch) -> list[int]:
        rows = batch.decodes
        for row, sequence in enumerate(rows.sequences):
            position = int(rows.positions[row])
            assert int(rows.tokens[row]) == sequence.tokens[position]
            table = rows.tables[row].tolist()
            assert int(rows.slots[row]) == self._slot(table, position)
            self._compute(sequence, table, position, position + 1)
        for chunk in batch.chunks:
            self._compute(chunk.sequence, chunk.table.tolist(), chunk.start, chunk.end)
        return [answer(s.request_id, len(s.tokens)) for s in batch.sampling]

    def _slot(self, table: list[int], position: int) -> int:
        block, offset = divmod(position, self._block_tokens)
        return table[block] * self._block_tokens + offset

    def _compute(self, sequence: Sequence, table: list[int], start: int, end: int) -> None:
        """Write tokens [start, end), then read all before `end` as attention does."""
        for position in range(start, end):
            written = (sequence.request_id, position, sequence.tokens[position])
            self._memory[self._slot(table, position)] = written
        for position in range(end):
            expected = (sequence.request_id, position, sequence.tokens[position])
            assert self._memory[self._slot(table, position)] == expected

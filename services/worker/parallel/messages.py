"""What rank 0 tells the others, as 64-bit integers: a batch to run, moves to carry out.

A batch travels as what forwards and kernels read of it. While the same rows decode, their tables
are sent only when one has grown, and only as wide as the longest; so a step of 64 rows takes some
kilobytes. Building a message costs O(what it holds).
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from enum import IntEnum
from typing import TypeAlias

import numpy as np

from services.costs import Direction
from services.worker.kv.transfers import KVTransfer, TransferPlan
from services.worker.requests.batch import NO_INTS, DecodeRows, Ints, PrefillChunk, StepBatch
from services.worker.requests.prompt import Prompt
from services.worker.requests.sequence import Sequence

Words: TypeAlias = Ints


class MessageKind(IntEnum):
    """The first word of a message."""

    RUN = 1  # a batch
    MOVE = 2  # moves
    SETTLE = 3  # serials of the uploads that may be read from now on
    RESET = 4  # no upload is under way any more
    END = 5


DIRECTIONS = tuple(Direction)
# Words before what follows them. Of a batch: its kind, how many rows, whether they are those of the
# last batch, how wide the tables are that follow (0: as they were), how many chunks.
HEAD = 5
CHUNK = 5  # its start, end, whether it samples, how many tokens it scores, blocks
MOVE = 4  # its serial, direction, tokens, blocks


def encode_message(kind: MessageKind, numbers: Seq[int] = ()) -> Words:
    return np.array([kind, *numbers], np.int64)


class BatchWriter:
    """Writes batches, one after the other, for one `BatchReader`."""

    def __init__(self) -> None:
        self._rows: DecodeRows | None = None
        self._version = -1

    def write(self, batch: StepBatch) -> Words:
        rows, width, tables = batch.decodes, 0, NO_INTS
        known = rows is self._rows
        if not known or rows.version != self._version:
            width = int(rows.positions[0]) // rows.block_tokens + 1 if len(rows) else 0
            tables = rows.tables[:, :width].ravel()
        self._rows, self._version = rows, rows.version
        head = np.array([MessageKind.RUN, len(rows), known, width, len(batch.chunks)], np.int64)
        chunks = (part for chunk in batch.chunks for part in _chunk_words(chunk))
        return np.concatenate([head, rows.tokens, rows.positions, rows.slots, tables, *chunks])


def _chunk_words(chunk: PrefillChunk) -> Iterator[Ints]:
    head = [chunk.start, chunk.end, chunk.samples, chunk.scored, len(chunk.table)]
    yield np.array(head, np.int64)
    yield chunk.table
    yield np.array(chunk.sequence.tokens[chunk.start : chunk.end], np.int64)


class BatchReader:
    """Makes batches that run as those that were written; who is in them stays unknown."""

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self._rows = DecodeRows([], [], block_tokens)

    def read(self, message: Words) -> StepBatch:
        _, count, known, width, chunks = message[:HEAD].tolist()
        left = message[HEAD:]
        tokens, positions, slots = left[: 3 * count].reshape(3, count)
        left = left[3 * count :]
        tables, left = left[: count * width].reshape(count, width), left[count * width :]
        if not known:
            self._rows = _decode_rows(tokens, positions, tables, self._block_tokens)
        elif width:
            _set_tables(self._rows, tables)
        rows = self._rows
        rows.tokens[:], rows.positions[:], rows.slots[:] = tokens, positions, slots
        return StepBatch(rows, list(self._chunks(left, chunks)))

    def _chunks(self, left: Words, count: int) -> Iterator[PrefillChunk]:
        for _ in range(count):
            start, end, samples, scored, blocks = left[:CHUNK].tolist()
            table, left = left[CHUNK : CHUNK + blocks].copy(), left[CHUNK + blocks :]
            tokens, left = left[: end - start].tolist(), left[end - start :]
            # Of what lies before and behind it only the length counts.
            sequence = _sequence([0] * start + tokens + [0] * (not samples))
            chunk = PrefillChunk(sequence, start, end, table)
            chunk.scored = scored
            yield chunk


def _decode_rows(tokens: Ints, positions: Ints, tables: Ints, block_tokens: int) -> DecodeRows:
    """Rows fall in length already, so they stay in their order."""
    sequences = []
    for token, position in zip(tokens.tolist(), positions.tolist(), strict=True):
        sequence = _sequence([token])
        sequence.computed = position
        sequences.append(sequence)
    return DecodeRows(sequences, [table.tolist() for table in tables], block_tokens)


def _sequence(tokens: list[int]) -> Sequence:
    return Sequence.start(Prompt("", tokens, len(tokens), 1), 1)


def _set_tables(rows: DecodeRows, tables: Ints) -> None:
    """In place as long as there is room, as whoever grew them did: kernels look at which array it
    is."""
    wide = tables.shape[1]
    if wide > rows.tables.shape[1]:
        rows.tables = np.zeros((len(rows), 2 * wide), np.int64)
    rows.tables[:, :wide] = tables
    rows.version += 1


def write_moves(moves: TransferPlan) -> Words:
    numbers = [len(moves.recalled), *moves.recalled]
    for move in moves.started:
        numbers += (move.serial, DIRECTIONS.index(move.direction), move.tokens)
        numbers += (len(move.device_blocks), *move.device_blocks, *move.host_blocks)
    return encode_message(MessageKind.MOVE, numbers)


def read_moves(message: Words) -> TransferPlan:
    recalled = int(message[1])
    left = message[2:].tolist()
    return TransferPlan(tuple(_moves(left[recalled:])), tuple(left[:recalled]))


def _moves(left: list[int]) -> Iterator[KVTransfer]:
    while left:
        serial, direction, tokens, blocks = left[:MOVE]
        device, host = left[MOVE : MOVE + blocks], left[MOVE + blocks : MOVE + 2 * blocks]
        left = left[MOVE + 2 * blocks :]
        # By its serial: a request may be on its way twice.
        yield KVTransfer(
            serial, str(serial), DIRECTIONS[direction], tuple(device), tuple(host), tokens
        )

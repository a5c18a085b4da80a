"""Control messages of rank 0, encoded as 64-bit integers: batches to run, transfers to start, and
changes of adapters.

A batch message has the inputs of forwards and kernels. While the same rows decode, their block
tables are sent only when one has grown, and only as wide as the longest: a step of 64 rows takes a
few kilobytes. Encoding is linear in the message size.
"""

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from enum import IntEnum
from typing import TypeAlias

import numpy as np

from services.costs import Direction
from services.worker.kv.transfers import KVTransfer, TransferPlan
from services.worker.requests.types.batch import NO_INTS, DecodeRows, Ints, PrefillChunk, StepBatch
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence

Words: TypeAlias = Ints


class MessageKind(IntEnum):
    """The first word of a message."""

    RUN = 1  # a batch
    MOVE = 2  # moves
    SETTLE = 3  # serials of completed uploads
    RESET = 4  # all uploads are cancelled
    LOAD_ADAPTER = 5  # name and folder
    PLACE_ADAPTER = 6  # name and slot
    UNLOAD_ADAPTER = 7  # name
    END = 8


DIRECTIONS = tuple(Direction)
# Header sizes in words. That of a batch: kind, rows, whether they are those of the last batch,
# width of the tables that follow (0: unchanged), chunks.
HEAD = 5
CHUNK = 6  # start, end, whether it samples, scored tokens, adapter slot, blocks
MOVE = 4  # serial, direction, tokens, blocks


def encode_message(kind: MessageKind, numbers: Seq[int] = ()) -> Words:
    return np.array([kind, *numbers], np.int64)


class BatchWriter:
    """Encodes batches for one `BatchReader`."""

    def __init__(self) -> None:
        self._rows: DecodeRows | None = None
        self._version = -1

    def write(self, batch: StepBatch) -> Words:
        rows, width, tables, adapters = batch.decodes, 0, NO_INTS, NO_INTS
        known = rows is self._rows
        if not known:
            adapters = np.array([s.adapter_slot for s in rows.sequences], np.int64)
        if not known or rows.version != self._version:
            width = int(rows.positions[0]) // rows.block_tokens + 1 if len(rows) else 0
            tables = rows.tables[:, :width].ravel()
        self._rows, self._version = rows, rows.version
        head = np.array([MessageKind.RUN, len(rows), known, width, len(batch.chunks)], np.int64)
        chunks = (part for chunk in batch.chunks for part in _chunk_words(chunk))
        return np.concatenate(
            [head, rows.tokens, rows.positions, rows.slots, adapters, tables, *chunks]
        )


def _chunk_words(chunk: PrefillChunk) -> Iterator[Ints]:
    adapter, blocks = chunk.sequence.adapter_slot, len(chunk.table)
    head = [chunk.start, chunk.end, chunk.samples, chunk.scored, adapter, blocks]
    yield np.array(head, np.int64)
    yield chunk.table
    yield np.array(chunk.sequence.tokens[chunk.start : chunk.end], np.int64)


class BatchReader:
    """Decodes batches that compute the same as the encoded ones, without request identities."""

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self._rows = DecodeRows([], [], block_tokens)

    def read(self, message: Words) -> StepBatch:
        _, count, known, width, chunks = message[:HEAD].tolist()
        left = message[HEAD:]
        tokens, positions, slots = left[: 3 * count].reshape(3, count)
        left = left[3 * count :]
        adapters, left = (NO_INTS, left) if known else (left[:count], left[count:])
        tables, left = left[: count * width].reshape(count, width), left[count * width :]
        if not known:
            self._rows = _decode_rows(tokens, positions, adapters, tables, self._block_tokens)
        elif width:
            _set_tables(self._rows, tables)
        rows = self._rows
        rows.tokens[:], rows.positions[:], rows.slots[:] = tokens, positions, slots
        return StepBatch(rows, list(self._chunks(left, chunks)))

    def _chunks(self, left: Words, count: int) -> Iterator[PrefillChunk]:
        for _ in range(count):
            start, end, samples, scored, adapter, blocks = left[:CHUNK].tolist()
            table, left = left[CHUNK : CHUNK + blocks].copy(), left[CHUNK + blocks :]
            tokens, left = left[: end - start].tolist(), left[end - start :]
            # Of the tokens before and after the chunk, only their number matters.
            sequence = _sequence([0] * start + tokens + [0] * (not samples), adapter)
            chunk = PrefillChunk(sequence, start, end, table)
            chunk.scored = scored
            yield chunk


def _decode_rows(
    tokens: Ints, positions: Ints, adapters: Ints, tables: Ints, block_tokens: int
) -> DecodeRows:
    """Rows are already sorted by falling length, so their order is kept."""
    sequences = []
    each = zip(tokens.tolist(), positions.tolist(), adapters.tolist(), strict=True)
    for token, position, adapter in each:
        sequence = _sequence([token], adapter)
        sequence.computed = position
        sequences.append(sequence)
    return DecodeRows(sequences, [table.tolist() for table in tables], block_tokens)


def _sequence(tokens: list[int], adapter_slot: int) -> Sequence:
    sequence = Sequence.start(Prompt("", tokens, len(tokens), 1), 1)
    sequence.adapter_slot = adapter_slot
    return sequence


def _set_tables(rows: DecodeRows, tables: Ints) -> None:
    """Sets the tables in place if they fit, as on rank 0, because kernels compare array
    identity."""
    wide = tables.shape[1]
    if wide > rows.tables.shape[1]:
        rows.tables = np.zeros((len(rows), 2 * wide), np.int64)
    rows.tables[:, :wide] = tables
    rows.version += 1


def write_adapter(kind: MessageKind, number: int, *texts: str) -> Words:
    """A change of an adapter, one byte of the texts per word."""
    return encode_message(kind, (number, *json.dumps(texts).encode()))


def read_adapter(message: Words) -> tuple[int, list[str]]:
    """Number and texts."""
    return int(message[1]), json.loads(bytes(message[2:].tolist()))


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
        # The serial stands for the request id, because one request may have two transfers.
        yield KVTransfer(
            serial, str(serial), DIRECTIONS[direction], tuple(device), tuple(host), tokens
        )

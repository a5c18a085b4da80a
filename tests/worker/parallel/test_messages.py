"""Messages of rank 0 to other ranks: batches that compute the same, and transfers."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.costs import Direction
from services.worker.engine.inputs import StepInputs
from services.worker.kv.transfers import KVTransfer, TransferPlan
from services.worker.parallel.messages import (
    BatchReader,
    BatchWriter,
    MessageKind,
    Words,
    encode_message,
    read_moves,
    write_moves,
)
from services.worker.requests.types.batch import DecodeRows, PrefillChunk, StepBatch
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams
from services.worker.requests.types.sequence import Sequence
from tests.worker.worker_fixtures import Feeder, engine_of, prompt_tokens

BLOCK_TOKENS = 4
SCORED = SamplingParams(prompt_logprobs=1)


def across(message: Words) -> Words:
    """The message as received: read-only bytes."""
    return np.frombuffer(bytes(message.data.cast("B")), np.int64)


def sequence(tokens: int, computed: int, how: SamplingParams = GREEDY) -> Sequence:
    made = Sequence.start(Prompt("r", tuple(range(100, 100 + tokens)), tokens, 1, how), 1)
    made.computed, made.adapter_slot = computed, tokens % 3 - 1
    return made


def seen(batch: StepBatch) -> list[Any]:
    """Everything of a batch that a forward and kernels read."""
    rows, inputs = batch.decodes, StepInputs(torch.device("cpu")).prepare(batch)
    wide = int(rows.positions[0]) // rows.block_tokens + 1 if len(rows) else 0
    packed = [inputs.tokens, inputs.positions, inputs.slots]
    return [
        len(rows),
        [x.tolist() for x in packed],
        None if inputs.rows is None else inputs.rows.tolist(),
        rows.tables[:, :wide].tolist(),
        [(c.start, c.end, c.tokens, c.samples, c.scored, c.table.tolist()) for c in batch.chunks],
        [s.adapter_slot for s in batch.sequences],
    ]


@given(
    lengths=st.lists(st.integers(1, 30), max_size=4),
    chunks=st.lists(
        st.tuples(
            st.integers(0, 9), st.integers(1, 9), st.booleans(), st.sampled_from([GREEDY, SCORED])
        ),
        max_size=3,
    ),
    steps=st.integers(1, 12),
)
def test_sent_batch_runs_as_the_original(lengths, chunks, steps):
    """Rows decode for a few steps and grow by blocks, some steps have chunks; then other rows
    follow."""
    writer, reader, block = BatchWriter(), BatchReader(BLOCK_TOKENS), iter(range(1, 10**6))
    for _ in range(2):
        rows = DecodeRows(
            [sequence(n + 1, n) for n in lengths],
            [[next(block) for _ in range(n // BLOCK_TOKENS + 1)] for n in lengths],
            BLOCK_TOKENS,
        )
        before = None
        for step in range(steps):
            more = [
                PrefillChunk(
                    sequence(start + count + (not samples), start, how),
                    start,
                    start + count,
                    np.array([next(block) for _ in range(-(-(start + count) // BLOCK_TOKENS))]),
                )
                for start, count, samples, how in chunks
            ]
            batch = StepBatch(rows, more if step % 2 else [])
            if not len(rows) and not batch.chunks:
                continue
            reported = reader.read(across(writer.write(batch)))
            assert seen(reported) == seen(batch)
            assert before is None or reported.decodes is before, (
                "kernels keep state per rows object"
            )
            before = reported.decodes
            for row in rows.advance().tolist():
                rows.set_block(row, next(block))
            rows.set_drawn([7 + step] * len(rows))


def test_steady_decode_message_is_a_few_numbers_per_row():
    """64 rows of 24 blocks: tables and slots of adapters are sent once; a grown table is sent
    again."""
    writer = BatchWriter()
    rows = DecodeRows([sequence(95, 94)] * 64, [list(range(24))] * 64, BLOCK_TOKENS)
    sizes = []
    for _ in range(3):
        sizes.append(len(writer.write(StepBatch(rows, []))))
        for row in rows.advance().tolist():
            rows.set_block(row, 9)
        rows.set_drawn([1] * 64)
    assert sizes == [5 + 64 * (3 + 1 + 24), 5 + 64 * 3, 5 + 64 * (3 + 25)]


def test_follower_engine_computes_the_same():
    """The follower has the same weights, and no requests."""
    reported, reader = engine_of("llama"), BatchReader(16)
    teller, writer = engine_of("llama"), BatchWriter()
    run = teller.run
    steps = []

    def both(batch: StepBatch) -> torch.Tensor:
        logits = run(batch)
        steps.append(torch.equal(logits, reported.run(reader.read(across(writer.write(batch))))))
        return logits

    teller.run = both  # type: ignore[method-assign]  # in between
    feeder = Feeder(teller)
    for i in range(4):
        feeder.add(f"r{i}", prompt_tokens(i, 3 + 20 * i), 12, SCORED if i % 2 else GREEDY)
    feeder.run()
    assert len(steps) == 12 and all(steps)


blocks = st.lists(st.integers(0, 2**40), max_size=5)


@given(
    moves=st.lists(
        st.tuples(st.integers(1, 99), st.sampled_from(Direction), blocks, st.integers(0, 80))
    ),
    recalled=st.lists(st.integers(1, 99), max_size=3),
)
def test_transfers_round_trip_without_owners(moves, recalled):
    sent = TransferPlan(
        tuple(
            KVTransfer(n, "any", way, tuple(b), tuple(1 + x for x in b), tokens)
            for n, way, b, tokens in moves
        ),
        tuple(recalled),
    )
    read = read_moves(across(write_moves(sent)))
    assert read.recalled == sent.recalled
    assert [
        (m.serial, m.direction, m.device_blocks, m.host_blocks, m.tokens) for m in read.started
    ] == [(m.serial, m.direction, m.device_blocks, m.host_blocks, m.tokens) for m in sent.started]
    assert [m.request_id for m in read.started] == [str(m.serial) for m in sent.started]


def test_every_message_has_its_kind():
    batch = StepBatch(DecodeRows([], [], 4), [])
    kinds = [
        BatchWriter().write(batch)[0],
        write_moves(TransferPlan())[0],
        encode_message(MessageKind.SETTLE, [3])[0],
    ]
    assert kinds == [MessageKind.RUN, MessageKind.MOVE, MessageKind.SETTLE]

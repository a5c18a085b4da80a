"""A simple device: it remembers what was written to each slot, and answers by rule."""

from zlib import crc32

import numpy as np

from services.costs import Direction
from services.worker.kv.transfers import KVTransfer, TransferPlan
from services.worker.requests.types.batch import PrefillChunk, StepBatch
from services.worker.requests.types.prompt import MAX_LOGPROBS, Prompt
from services.worker.requests.types.scores import Opening, PromptLogprobs
from services.worker.requests.types.sequence import UNKNOWN, Sequence

EOS = 0

# Scores of the prompt token at an index, none of them 0, and of the k most likely tokens there.
LOGPROB, TOP_LOGPROB = -1.0, -2.0

# The salt and adapter, and all tokens up to the one of this KV.
Written = tuple[tuple[str, str], tuple[int, ...]]
BROKEN: Written = (("", ""), ())  # by a failed step, or one launched behind it


def answer(request_id: str, length: int) -> int:
    """The token at index `length` of this request; one in eight ends it."""
    return crc32(f"{request_id}:{length}".encode()) % 8


def scores_of(chunk: PrefillChunk) -> PromptLogprobs:
    """The scores of a chunk's prompt tokens, by rule."""
    first, tokens = chunk.start + 1, chunk.sequence.tokens
    ids = np.array(tokens[first : first + chunk.scored], np.int64)
    indices = np.arange(first, first + chunk.scored)
    likeliest = np.broadcast_to(indices[:, None], (chunk.scored, MAX_LOGPROBS))
    return PromptLogprobs(
        ids,
        (LOGPROB * indices).astype(np.float32),
        likeliest,
        (TOP_LOGPROB * likeliest).astype(np.float32),
    )


def check_opening(prompt: Prompt, opening: Opening, sharing: bool) -> None:
    """Checks what is sent with the first token of a placement."""
    sampling, delivered = prompt.sampling, len(prompt.token_ids) > prompt.prompt_tokens
    scored = sampling.prompt_logprobs is not None and not delivered
    assert 0 <= opening.cached_tokens <= prompt.prompt_tokens * sharing * (not scored)
    assert (opening.prompt_logprobs is not None) == scored
    if opening.prompt_logprobs is None or sampling.prompt_logprobs is None:
        return
    ids, chosen, top_ids, top = (column.tolist() for column in opening.prompt_logprobs)
    indices, k = range(1, prompt.prompt_tokens), sampling.prompt_logprobs
    assert ids == [*prompt.token_ids[1:]]
    assert chosen == [LOGPROB * index for index in indices]
    assert top_ids == [[index] * k for index in indices]
    assert top == [[TOP_LOGPROB * index] * k for index in indices]


class RuleDevice:
    """Stores by slot what KV stands for, in two memories, and checks every context that it reads.
    Uploads write only when a test completes them."""

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self._memory: dict[int, Written] = {}
        self._host: dict[int, Written] = {}
        self.pending: dict[int, KVTransfer] = {}
        self.drawn: list[int] = []  # in the last step, read by the next one
        self._adapters: dict[int, str] = {}  # by slot

    def place(self, placements: list[tuple[str, int]]) -> None:
        """Copies adapters to slots."""
        self._adapters |= {slot: name for name, slot in placements}

    def carry_out(self, moves: TransferPlan) -> None:
        for serial in moves.recalled:
            self.pending.pop(serial, None)
        for move in moves.started:
            if move.serial in moves.recalled:
                continue
            if move.direction is Direction.OFFLOAD:
                self._copy(self._memory, move.device_blocks, self._host, move.host_blocks, move)
            else:
                self.pending[move.serial] = move

    def finish(self, serial: int) -> None:
        """Completes an upload."""
        move = self.pending.pop(serial)
        self._copy(self._host, move.host_blocks, self._memory, move.device_blocks, move)

    def _copy(
        self,
        source: dict[int, Written],
        from_blocks: tuple[int, ...],
        target: dict[int, Written],
        to_blocks: tuple[int, ...],
        move: KVTransfer,
    ) -> None:
        for position in range(move.tokens):
            written = source[self._slot(from_blocks, position)]
            target[self._slot(to_blocks, position)] = written

    def run(self, batch: StepBatch, breaks: bool = False) -> list[int]:
        """Returns the draws of each row. A failed step stores garbage that must never be read."""
        rows, fed = batch.decodes, batch.decodes.fed
        for row, sequence in enumerate(rows.sequences):
            position = int(rows.positions[row])
            text = tuple(sequence.tokens)
            assert len(text) == position + 1
            if fed is not None and fed[row] >= 0:
                assert text[-1] == UNKNOWN
                text = (*text[:-1], self.drawn[fed[row]])
            else:
                assert int(rows.tokens[row]) == text[-1]
            table = rows.tables[row].tolist()
            assert int(rows.slots[row]) == self._slot(table, position)
            self._compute(sequence, text, table, position, position + 1, breaks)
        for chunk in batch.chunks:
            text = (*chunk.sequence.tokens, *chunk.drafts)
            table = chunk.table.tolist()
            self._compute(chunk.sequence, text, table, chunk.start, chunk.end, breaks)
        sequences, ahead = batch.draws
        lengths = [len(s.tokens) for s in sequences]
        if ahead is not None:
            lengths = [length + more for length, more in zip(lengths, ahead.tolist(), strict=True)]
        self.drawn = [
            answer(s.request_id, length) for s, length in zip(sequences, lengths, strict=True)
        ]
        return self.drawn

    def _slot(self, table: list[int] | tuple[int, ...], position: int) -> int:
        block, offset = divmod(position, self._block_tokens)
        return table[block] * self._block_tokens + offset

    def _compute(
        self,
        sequence: Sequence,
        text: tuple[int, ...],
        table: list[int],
        start: int,
        end: int,
        breaks: bool,
    ) -> None:
        """Writes tokens [start, end), then reads all before `end`, as attention does."""
        prompt = sequence.prompt
        salt = prompt.cache_salt, prompt.adapter
        assert self._adapters.get(sequence.adapter_slot, "") == prompt.adapter
        for position in range(start, end):
            written = BROKEN if breaks else (salt, text[: position + 1])
            self._memory[self._slot(table, position)] = written
        if breaks:
            return
        assert UNKNOWN not in text[:end], "computed from an unknown token"
        for position in range(end):
            assert self._memory[self._slot(table, position)] == (salt, text[: position + 1])

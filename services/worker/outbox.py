"""Tokens for one gateway: one message per step, or one for several steps if these are short or the
gateway reads slowly."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from protos.generated import worker_pb2
from services.runtime.network.streams import Outbox
from services.worker.codec import encode_error, encode_refusal, extend_tokens
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.scores import SCORES_BYTES, PromptLogprobs, encoded_bytes

MAX_BATCHES = 8  # one waits usually; scored prompts may fill several
# A message costs both sides as much as the tokens of a few steps. A gateway with many streams
# writes to none of them more often than this.
PAUSE_S = 0.000_25  # after a message, per request in it
LONGEST_PAUSE_S = 0.02


class TokenOutbox(Outbox[worker_pb2.TokenBatch]):
    """Merges tokens into one waiting batch until the writer takes it. Another batch follows one
    that is full of scored prompts.

    A batch with the beginning or end of an answer is written at once, others after a pause. A
    gateway with more than `limit_tokens` or MAX_BATCHES waiting is disconnected.
    """

    def __init__(self, limit_tokens: int):
        super().__init__(limit=MAX_BATCHES)
        self._limit_tokens = limit_tokens
        self._waiting_tokens = 0
        self._batch: worker_pb2.TokenBatch | None = None  # the batch that accepts more
        self._scored_bytes = 0  # in that batch
        self._waiting: dict[str, worker_pb2.RequestTokens] = {}  # its messages by request
        self._urgent = asyncio.Event()  # whether that batch begins or ends an answer
        self._next_s = 0.0

    def add(self, token: NewToken) -> None:
        if self.overflowed:
            return
        extend_tokens(self._message(token.request_id, token.offset), token)
        if token.opening is not None and token.opening.prompt_logprobs is not None:
            self._count_scores(token.opening.prompt_logprobs)
        if token.opening is not None or token.finish is not None:
            self._urgent.set()
        self._waiting_tokens += 1
        if self._waiting_tokens > self._limit_tokens:
            self.overflowed = True
            self.close()

    def add_error(self, request_id: str, offset: int, why: str) -> None:
        """Ends a request; its waiting tokens go first."""
        self._end(request_id, offset, encode_error(why))

    def add_refusal(self, request_id: str, offset: int, why: str) -> None:
        """Ends a request that can never run here; its waiting tokens go first."""
        self._end(request_id, offset, encode_refusal(why))

    def _end(self, request_id: str, offset: int, error: worker_pb2.RequestTokens) -> None:
        self._message(request_id, offset).MergeFrom(error)
        self._urgent.set()

    def close(self) -> None:
        super().close()
        self._urgent.set()

    def _count_scores(self, scores: PromptLogprobs) -> None:
        """Closes a batch with many scores, so that the next prompt's scores do not make it too
        large to send."""
        self._scored_bytes += encoded_bytes(*scores.top.shape)
        if self._scored_bytes >= SCORES_BYTES:
            self._close_batch()

    def _close_batch(self) -> None:
        self._batch, self._waiting, self._scored_bytes = None, {}, 0

    def _message(self, request_id: str, offset: int) -> worker_pb2.RequestTokens:
        if self._batch is None:
            self._batch = worker_pb2.TokenBatch()
            self.put(self._batch)
        message = self._waiting.get(request_id)
        # A token that does not follow the waiting ones belongs to a later placement of the request.
        if message is None or message.offset + len(message.token_ids) != offset:
            message = self._batch.requests.add(request_id=request_id, offset=offset)
            self._waiting[request_id] = message
        return message

    async def __aiter__(self) -> AsyncIterator[worker_pb2.TokenBatch]:
        async for batch in super().__aiter__():
            await self._until_due()
            if batch is self._batch:  # no other batch waits behind it
                self._close_batch()
                self._waiting_tokens = 0
                self._urgent.clear()
            pause_s = min(LONGEST_PAUSE_S, len(batch.requests) * PAUSE_S)
            self._next_s = time.monotonic() + pause_s
            yield batch

    async def _until_due(self) -> None:
        left_s = self._next_s - time.monotonic()
        if left_s > 0 and not self._urgent.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._urgent.wait()

"""Tokens on their way to one gateway: one message a step, or of several steps where these are short
or the gateway reads slowly."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from protos.generated import worker_pb2
from services.runtime.streams import Outbox
from services.worker.codec import encode_error, extend_tokens
from services.worker.requests.batch import NewToken
from services.worker.requests.scores import SCORES_BYTES, PromptLogprobs, encoded_bytes

BATCHES_MAX = 8  # one waits, but scored prompts may fill one after the other
# A message costs both sides as much as the tokens of a few steps; a gateway of many streams writes
# to none of them more often than this.
PAUSE_S = 0.000_25  # after a message, for each request in it
LONGEST_PAUSE_S = 0.02


class TokenOutbox(Outbox[worker_pb2.TokenBatch]):
    """One batch waits at a time; what comes before the writer takes it is merged into it. Where it
    is full of scored prompts, another waits behind it.

    The writer takes one at once that begins or ends an answer, others a while after the last.

    A gateway that lets more than `limit_tokens` pile up, or BATCHES_MAX, is cut off.
    """

    def __init__(self, limit_tokens: int):
        super().__init__(limit=BATCHES_MAX)
        self._limit_tokens = limit_tokens
        self._waiting_tokens = 0
        self._batch: worker_pb2.TokenBatch | None = None  # which takes more
        self._scored_bytes = 0  # in it
        self._waiting: dict[str, worker_pb2.RequestTokens] = {}  # the batch's, by request
        self._urgent = asyncio.Event()  # something of what waits
        self._next_s = 0.0

    def add(self, token: NewToken) -> None:
        if self.overflowed:
            return
        extend_tokens(self._message(token.request_id, token.offset), token)
        if token.opening is not None and token.opening.prompt_logprobs is not None:
            self._scored(token.opening.prompt_logprobs)
        if token.opening is not None or token.finish is not None:
            self._urgent.set()
        self._waiting_tokens += 1
        if self._waiting_tokens > self._limit_tokens:
            self.overflowed = True
            self.close()

    def add_error(self, request_id: str, offset: int, why: str) -> None:
        """End a request; its tokens that wait go first."""
        self._message(request_id, offset).MergeFrom(encode_error(why))
        self._urgent.set()

    def close(self) -> None:
        super().close()
        self._urgent.set()

    def _scored(self, scores: PromptLogprobs) -> None:
        """A batch of many takes no more: with those of one prompt more it would still be sent."""
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
        # What follows on nothing that waits belongs to a later stay of the request here.
        if message is None or message.offset + len(message.token_ids) != offset:
            message = self._batch.requests.add(request_id=request_id, offset=offset)
            self._waiting[request_id] = message
        return message

    async def __aiter__(self) -> AsyncIterator[worker_pb2.TokenBatch]:
        async for batch in super().__aiter__():
            await self._until_due()
            if batch is self._batch:  # none waits behind it
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

"""Tokens on their way to one gateway: one message a step, or more in one when it reads slowly."""

from collections.abc import AsyncIterator

from protos import worker_pb2
from services.runtime.streams import Outbox
from services.worker.codec import encode_error, extend_tokens
from services.worker.requests.batch import NewToken


class TokenOutbox(Outbox[worker_pb2.TokenBatch]):
    """One batch waits at a time; what comes before the writer takes it is merged into it.

    A gateway that lets more than `limit_tokens` pile up is cut off.
    """

    def __init__(self, limit_tokens: int):
        super().__init__(limit=1)
        self._limit_tokens = limit_tokens
        self._waiting_tokens = 0
        self._batch: worker_pb2.TokenBatch | None = None
        self._waiting: dict[str, worker_pb2.RequestTokens] = {}  # the batch's, by request

    def add(self, token: NewToken) -> None:
        if self.overflowed:
            return
        extend_tokens(self._message(token.request_id, token.offset), token)
        self._waiting_tokens += 1
        if self._waiting_tokens > self._limit_tokens:
            self.overflowed = True
            self.close()

    def add_error(self, request_id: str, offset: int, why: str) -> None:
        """End a request; its tokens that wait go first."""
        self._message(request_id, offset).MergeFrom(encode_error(why))

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
            self._batch = None
            self._waiting = {}
            self._waiting_tokens = 0
            yield batch

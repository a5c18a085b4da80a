"""Rounds put to the batcher: on the serving path, so a failed one is asked again after a pause."""

import asyncio
import logging

import grpc
from grpc import aio

from protos import batcher_pb2_grpc
from services.runtime.config import ConfigError
from services.scheduler import events as ev
from services.scheduler.advice.interface import Owner, sentence
from services.scheduler.codec import decode_batch, encode_problem

log = logging.getLogger(__name__)

PAUSE_S = 0.1


class Rounds:
    """At most one is under way, as the state asks for them."""

    def __init__(self, timeout_s: float, batcher: aio.Channel, owner: Owner):
        self._timeout_s = timeout_s
        self._batcher = batcher_pb2_grpc.BatcherStub(batcher)
        self._owner = owner
        self._problems: asyncio.Queue[ev.AskBatch] = asyncio.Queue()

    def ask(self, action: ev.AskBatch) -> None:
        self._problems.put_nowait(action)

    async def run(self) -> None:
        while True:
            problem = await self._problems.get()
            with self._owner.metrics.round_seconds.time():
                batches = await self._batches(problem)
            self._owner.dispatch(ev.Formed(problem.round, batches))

    async def _batches(self, problem: ev.AskBatch) -> tuple[ev.Batch, ...]:
        try:
            answer = await self._batcher.Form(encode_problem(problem), timeout=self._timeout_s)
            return tuple(decode_batch(b) for b in answer.batches)
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:  # it will be no better next time
                raise ConfigError(f"the batcher refuses the preset: {error.details()}") from None
            log.warning("batcher: %s; the round is asked again", sentence(error))
            await asyncio.sleep(PAUSE_S)
            return ()

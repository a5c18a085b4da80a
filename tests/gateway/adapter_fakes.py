"""The part of a fake scheduler that loads LoRA adapters: from any folder but /bad."""

import asyncio
from collections.abc import Sequence
from typing import Any

from protos.generated import scheduler_pb2 as sched
from protos.generated import scheduler_pb2_grpc
from services.runtime.errors import InvalidArgument


class FakeAdapters(scheduler_pb2_grpc.SchedulerServicer):
    worker_address: str
    adapters: list[sched.Adapter]
    streams: list[asyncio.Queue[sched.SchedulerEvent | None]]

    def fleet(self, addresses: Sequence[str]) -> sched.SchedulerEvent:
        raise NotImplementedError

    async def LoadAdapter(self, request: sched.Adapter, context: Any) -> sched.AdapterResponse:
        if request.path == "/bad":
            raise InvalidArgument("path", "the folder /bad does not exist")
        return self._set([*self.adapters, request])

    async def UnloadAdapter(self, request: sched.Adapter, context: Any) -> sched.AdapterResponse:
        return self._set([each for each in self.adapters if each.name != request.name])

    def _set(self, adapters: list[sched.Adapter]) -> sched.AdapterResponse:
        self.adapters = adapters
        self.streams[-1].put_nowait(self.fleet([self.worker_address]))
        return sched.AdapterResponse()

"""Availability: the worker is attached to the scheduler while its server answers."""

import asyncio

from protos.generated import scheduler_pb2
from services.worker.attachment import Attachment
from services.worker.codec import encode_hello
from services.worker.config import WorkerConfig
from services.worker.requests.types.limits import Limits


class Availability:
    """Of one server, in the event loop of the worker's service. `hello` is filled in whenever the
    server answers again: its capacity may have changed."""

    def __init__(self, config: WorkerConfig):
        self.hello = scheduler_pb2.WorkerHello()
        self._config = config
        self._up, self._down = asyncio.Event(), asyncio.Event()

    def set_up(self, limits: Limits, about: str, start: str) -> None:
        """The server answers, and has these limits."""
        self.hello.CopyFrom(encode_hello(self._config, limits, about, start=start))
        self._down.clear()
        self._up.set()

    def set_down(self) -> None:
        """The server does not answer: its requests move to other workers."""
        self._up.clear()
        self._down.set()

    async def attach(self, attachment: Attachment) -> None:
        """Runs the attachment while the server is up. Returns once the worker is drained; raises
        what the attachment raises."""
        while True:
            await self._up.wait()
            attached = asyncio.create_task(attachment.run())
            lost = asyncio.create_task(self._down.wait())
            try:
                await asyncio.wait({attached, lost}, return_when=asyncio.FIRST_COMPLETED)
                if attached.done():
                    return attached.result()
            finally:
                for task in (attached, lost):
                    task.cancel()
                await asyncio.gather(attached, lost, return_exceptions=True)

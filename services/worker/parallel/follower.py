"""`python -m services.worker.parallel.follower FD`: a rank that repeats the steps of rank 0.

Rank 0 starts this process and holds the other end of the control socket FD. The process ends with
rank 0. If it fails, it sends the reason to rank 0.
"""

import json
import logging
import os
import select
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from threading import Thread

import numpy as np
import transformers

from services.runtime.telemetry.logs import configure_logging
from services.worker.config import EngineConfig
from services.worker.engine.ranks import Ranks, rank_device
from services.worker.engine.step import Engine
from services.worker.kv.transfers import TransferPlan
from services.worker.model.adapters.files import Adapter
from services.worker.model.adapters.pool import AdapterPool
from services.worker.model.rank_group import RankGroup, find_store
from services.worker.model.tensor_sharding import TensorSharder
from services.worker.parallel.messages import (
    BatchReader,
    MessageKind,
    Words,
    read_adapter,
    read_moves,
)

log = logging.getLogger(__name__)

EXIT_GRACE_S = 1.0  # a collective may detect the end of rank 0 before the control socket does


class Follower(Ranks):
    """A rank other than 0."""

    def __init__(self, rank: int, group: RankGroup, control: Connection):
        self.rank = rank
        self.size = group.size
        self.sharder = TensorSharder(group, partial(self.all_reduce_min, 0))
        self._control = control

    def all_reduce_min(self, number: int) -> int:
        send_json(self._control, number=number)
        return int(json.loads(self._control.recv_bytes())["number"])


def send_json(control: Connection, **fields: int | str) -> None:
    control.send_bytes(json.dumps(fields).encode())


def follow(control: Connection) -> None:
    """Loads this rank's engine and runs it until rank 0 ends."""
    hello = json.loads(control.recv_bytes())
    config = EngineConfig(**hello["config"])
    send_json(control, number=0)
    rank, size = hello["rank"], config.tensor_parallel
    device = rank_device(config, rank)
    group = RankGroup.join(rank, size, find_store(hello["port"], size), device)
    engine = Engine.load(config, ranks=Follower(rank, group, control))
    send_json(control, number=0)
    FollowerLoop(engine).run(control)
    group.leave()


class FollowerLoop:
    """Repeats the steps of rank 0 in message order. Does not wait for the device."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._swapper = engine.swapper
        self._batches = BatchReader(engine.state.limits.block_tokens)
        self._arrived: set[int] = set()  # uploads complete here, but not yet on rank 0
        self._adapters = FollowedAdapters(engine.model.adapters)

    def run(self, control: Connection) -> None:
        """Handles messages until END."""
        while True:
            message: Words = np.frombuffer(control.recv_bytes(), np.int64)
            match MessageKind(message[0]):
                case MessageKind.RUN:
                    self._engine.run(self._batches.read(message))
                case MessageKind.MOVE:
                    self._move(read_moves(message))
                case MessageKind.SETTLE:
                    self._settle(set(message[1:].tolist()))
                case MessageKind.RESET:
                    self._arrived.clear()
                    self._swapper.reset()
                case MessageKind.LOAD_ADAPTER:
                    self._adapters.load(*read_adapter(message)[1])
                case MessageKind.PLACE_ADAPTER:
                    self._adapters.place(*read_adapter(message))
                case MessageKind.UNLOAD_ADAPTER:
                    self._adapters.unload(*read_adapter(message)[1])
                case MessageKind.END:
                    return

    def _move(self, moves: TransferPlan) -> None:
        self._arrived.difference_update(moves.recalled)
        if self._swapper.start(moves):
            raise RuntimeError("this rank has no host memory for an offload for which rank 0 has")

    def _settle(self, serials: set[int]) -> None:
        """Waits until the uploads that are complete on rank 0 are complete here."""
        while not serials <= self._arrived:
            self._swapper.wait()
            self._arrived.update(self._swapper.settle())
        self._arrived -= serials


class FollowedAdapters:
    """The adapters of rank 0, in this rank's parts. Files that rank 0 has read are read in a
    thread, and awaited when the adapter is first needed."""

    def __init__(self, pool: AdapterPool):
        self._pool = pool
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._reading: dict[str, Future[Adapter]] = {}

    def load(self, name: str, path: str) -> None:
        self._reading[name] = self._thread.submit(self._pool.read, name, path)

    def place(self, slot: int, names: Sequence[str]) -> None:
        [name] = names
        if reading := self._reading.pop(name, None):
            self._pool.load(reading.result())
        self._pool.place(name, slot)

    def unload(self, name: str) -> None:
        self._reading.pop(name, None)
        self._pool.retire(name)
        self._pool.free_unused(self._pool.held)


def exit_with(control: Connection) -> None:
    """Exits when rank 0 ends, even if this process is blocked in a collective."""
    hang_up = select.poll()
    hang_up.register(control.fileno(), 0)
    hang_up.poll()
    os._exit(0)


def main() -> None:
    control = Connection(int(sys.argv[1]))
    Thread(target=exit_with, args=(control,), daemon=True).start()
    configure_logging("worker", "ERROR")  # rank 0 logs everything below
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        follow(control)
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, ValueError):
            time.sleep(EXIT_GRACE_S)
            log.exception("a rank of this worker failed")
            send_json(control, broken=why)
        else:
            send_json(control, error=why)
        os._exit(2)
    os._exit(0)  # nothing to clean up; unloading PyTorch takes seconds


if __name__ == "__main__":
    main()

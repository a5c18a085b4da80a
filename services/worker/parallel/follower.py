"""`python -m services.worker.parallel.follower NUMBER`: a rank that repeats what rank 0 does.

Started by rank 0 alone, which is at the other end of the socket of that number. It ends with it,
however that goes, and says why where it ends by itself.
"""

import json
import logging
import os
import select
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from threading import Thread

import numpy as np
import transformers

from services.runtime.observed.logs import log_as
from services.worker.config import EngineConfig
from services.worker.engine.ranks import Moving, rank_device
from services.worker.engine.step import Engine
from services.worker.kv.transfers import TransferPlan
from services.worker.model.sharding import ModelSharder
from services.worker.parallel.group import RankGroup, find_store
from services.worker.parallel.messages import BatchReader, MessageKind, Words, read_moves
from services.worker.parallel.tensor_sharding import TensorSharder
from services.worker.requests.batch import StepBatch

log = logging.getLogger(__name__)

EXIT_GRACE_S = 1.0  # between the end of rank 0 as a collective sees it and as its socket does


class FollowerRanks:
    """`Ranks` of another than rank 0."""

    def __init__(self, rank: int, group: RankGroup, control: Connection):
        self.rank = rank
        self.size = group.size
        self.swapper: Moving
        self.part: ModelSharder = TensorSharder(group, partial(self.least, 0))
        self._control = control
        self._nothing = nullcontext()

    def least(self, number: int) -> int:
        send_json(self._control, number=number)
        return int(json.loads(self._control.recv_bytes())["number"])

    def moving(self, swapper: Moving) -> Moving:
        self.swapper = swapper
        return swapper

    def together(self, batch: StepBatch) -> AbstractContextManager[None]:
        return self._nothing

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def send_json(control: Connection, **what: int | str) -> None:
    control.send_bytes(json.dumps(what).encode())


def follow(control: Connection) -> None:
    """Until rank 0 says that it is over, or is gone."""
    hello = json.loads(control.recv_bytes())
    config = EngineConfig(**hello["config"])
    send_json(control, number=0)
    rank, size = hello["rank"], config.tensor_parallel
    device = rank_device(config, rank)
    group = RankGroup.join(rank, size, find_store(hello["port"], size), device)
    ranks = FollowerRanks(rank, group, control)
    engine = Engine.load(config, ranks=ranks)
    send_json(control, number=0)
    FollowerLoop(engine, ranks.swapper).run(control)
    group.leave()


class FollowerLoop:
    """Does what rank 0 did, one message after the other. What is issued to the device is not
    waited for."""

    def __init__(self, engine: Engine, swapper: Moving):
        self._engine = engine
        self._swapper = swapper
        self._batches = BatchReader(engine.state.limits.block_tokens)
        self._arrived: set[int] = set()  # uploads that are here, and not yet at rank 0

    def run(self, control: Connection) -> None:
        """Until it is over."""
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
                case MessageKind.END:
                    return

    def _move(self, moves: TransferPlan) -> None:
        self._arrived.difference_update(moves.recalled)
        if self._swapper.start(moves):
            raise RuntimeError("host memory has no room for an offload that rank 0 had room for")

    def _settle(self, serials: set[int]) -> None:
        """These have arrived at rank 0: from here on they have here, too."""
        while not serials <= self._arrived:
            self._swapper.wait()
            self._arrived.update(self._swapper.settle())
        self._arrived -= serials


def end_with(control: Connection) -> None:
    """End once rank 0 is gone, wherever this process stands then: it may be a collective that
    nobody else is in."""
    hang_up = select.poll()
    hang_up.register(control.fileno(), 0)
    hang_up.poll()
    os._exit(0)


def main() -> None:
    control = Connection(int(sys.argv[1]))
    Thread(target=end_with, args=(control,), daemon=True).start()
    log_as("worker", "ERROR")  # rank 0 says the rest
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
    os._exit(0)  # nothing is left to tidy up, and Python takes seconds to unload PyTorch


if __name__ == "__main__":
    main()

"""Leader: rank 0 starts the other ranks, sends them the steps to repeat, and watches them.

Each follower is a separate process with a control socket to this one: one message per step, and
one per transfer plan. Tensors go through the group. Either side detects the end of the other by
the closed socket.
"""

import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from socket import socketpair
from threading import Event, Thread

import torch

from services.worker.config import EngineConfig
from services.worker.engine.ranks import Ranks, RanksApart
from services.worker.kv.transfers import TransferPlan
from services.worker.model.rank_group import RankGroup, open_store
from services.worker.model.tensor_sharding import TensorSharder
from services.worker.parallel.messages import (
    BatchWriter,
    MessageKind,
    Words,
    encode_message,
    write_adapter,
    write_moves,
)
from services.worker.requests.types.batch import StepBatch

log = logging.getLogger(__name__)

MODULE = "services.worker.parallel.follower"
ENGINE_FIELDS = set(EngineConfig.model_fields)
DETECT_S = 2.0  # wait after a failed step for the end of another rank, which then is the reason
# Time limit for a follower to exit, and for this process to exit after the loss of a rank, because
# it may be blocked in a collective.
END_S = 10.0


class FollowerProcess:
    """Process of a rank, and the control socket to it."""

    def __init__(self, rank: int, size: int):
        self.name = f"rank {rank} of this worker's {size}"
        ours, theirs = socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a signal to the worker reaches rank 0 only
            )
        self.control = Connection(ours.detach())

    def send(self, message: bytes | memoryview) -> None:
        """Sends a message. Raises RanksApart if the rank has ended."""
        try:
            self.control.send_bytes(message)
        except OSError:
            raise RanksApart(self.exit_reason() or f"{self.name} no longer answers") from None

    def receive_number(self) -> int:
        """Returns its next number. Raises RanksApart, with its reported reason, if it has ended."""
        try:
            reply = json.loads(self.control.recv_bytes())
        except (EOFError, OSError):
            raise RanksApart(self._ended()) from None
        if "error" in reply:
            raise RanksApart(reply["error"])
        if "broken" in reply:
            raise RanksApart(f"{self.name} failed: {reply['broken']}")
        return int(reply["number"])

    def end(self) -> None:
        """Requests its exit, which fails while it is blocked in a collective."""
        with suppress(OSError):  # it has ended
            self.control.send_bytes(encode_message(MessageKind.END).data.cast("B"))

    def stop(self) -> None:
        """Closes the socket and waits for its exit; kills it after END_S."""
        self.control.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def exit_reason(self) -> str:
        """Returns why it ended or is about to; empty if it is alive and silent for DETECT_S."""
        try:
            while self.control.poll(DETECT_S):
                self.receive_number()
        except RanksApart as error:
            return str(error)
        except OSError:  # closed here, meanwhile
            pass
        return ""

    def _ended(self) -> str:
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"{self.name} no longer answers"
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"{self.name} ended with {how}"


class Leader(Ranks):
    """Rank 0."""

    def __init__(self, config: EngineConfig, device: torch.device):
        """Starts the other ranks and waits until they have joined. Raises RanksApart."""
        self.size = config.tensor_parallel
        self.lost = ""  # reason, once a rank is lost
        self._seen = Event()
        self._closed = Event()
        self._writer = BatchWriter()
        self._followers = [FollowerProcess(rank, self.size) for rank in range(1, self.size)]
        self._group: RankGroup | None = None
        self._loaded = False
        try:
            self._group = self._start_group(config, device)
        except BaseException:
            self.close()
            raise
        self.sharder = TensorSharder(self._group, partial(self.all_reduce_min, 0))

    def _start_group(self, config: EngineConfig, device: torch.device) -> RankGroup:
        self._store = open_store(self.size)
        for rank, follower in enumerate(self._followers, 1):
            hello = {
                "rank": rank,
                "port": self._store.port,
                "config": config.model_dump(include=ENGINE_FIELDS),
            }
            follower.send(json.dumps(hello).encode())
        for follower in self._followers:
            follower.receive_number()  # the process has started
        return RankGroup.join(0, self.size, self._store, device)

    def ready(self) -> None:
        """Waits until all ranks are loaded, then watches for their end."""
        for follower in self._followers:
            follower.receive_number()
        self._loaded = True
        Thread(target=self._watch_followers, name="ranks", daemon=True).start()

    def all_reduce_min(self, number: int) -> int:
        least = min(number, *(follower.receive_number() for follower in self._followers))
        self._send_all(json.dumps({"number": least}).encode())
        return least

    @contextmanager
    def run_together(self, batch: StepBatch) -> Iterator[None]:
        self.check()
        self._send(self._writer.write(batch))
        try:
            yield
        except Exception as error:
            raise self.divergence(error) from error

    def divergence(self, error: Exception) -> RanksApart:
        """Returns why a step failed: a lost rank, or the error on this rank."""
        if not self._loaded:
            self.lost = next(filter(None, (f.exit_reason() for f in self._followers)), "")
        self._seen.wait(DETECT_S * self._loaded)
        here = f"rank 0 of {self.size} failed: {' '.join(str(error).split())}"
        return RanksApart(self.lost or here)

    def check(self) -> None:
        if self.lost:
            raise RanksApart(self.lost)

    def send_moves(self, moves: TransferPlan) -> None:
        self._send(write_moves(moves))

    def send_settled(self, serials: Sequence[int]) -> None:
        self._send(encode_message(MessageKind.SETTLE, serials))

    def send_reset(self) -> None:
        self._send(encode_message(MessageKind.RESET))

    def send_adapter_load(self, name: str, path: str) -> None:
        self._send(write_adapter(MessageKind.LOAD_ADAPTER, 0, name, path))

    def send_adapter_placement(self, name: str, slot: int) -> None:
        self._send(write_adapter(MessageKind.PLACE_ADAPTER, slot, name))

    def send_adapter_unload(self, name: str) -> None:
        self._send(write_adapter(MessageKind.UNLOAD_ADAPTER, 0, name))

    def _send(self, message: Words) -> None:
        self._send_all(message.data.cast("B"))

    def _send_all(self, message: bytes | memoryview) -> None:
        for follower in self._followers:
            follower.send(message)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        for follower in self._followers:
            follower.end()
        if self._group is not None:
            self._group.leave(whole=self._loaded and not self.lost)
        for follower in self._followers:
            follower.stop()

    def _watch_followers(self) -> None:
        """Waits in its own thread until a rank ends."""
        ends = select.poll()
        by_number = {follower.control.fileno(): follower for follower in self._followers}
        for number in by_number:
            ends.register(number, 0)  # POLLHUP is always reported
        ((number, _), *_) = ends.poll()
        if self._closed.is_set():
            return
        self.lost = by_number[number].exit_reason()
        self._seen.set()
        if not self._closed.wait(END_S):
            log.critical("%s, and rank 0 does not respond; the worker exits", self.lost)
            os._exit(2)

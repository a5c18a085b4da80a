"""RankGroup: collective operations between the ranks of a replica. Carries tensors only.

gloo on a CPU, NCCL on GPUs. Sums come out alike on every rank, bit for bit, so that what all ranks
compute on is the same.
"""

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # at run time only

HOST = "127.0.0.1"  # the ranks of a replica are on one machine
# How long a collective waits for the slowest: a kernel may be compiled meanwhile. Whoever is gone
# is noticed sooner.
TIMEOUT = timedelta(seconds=120)
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process's place in it."""

    rank: int
    size: int

    @classmethod
    def join(cls, rank: int, size: int, store: Store, device: torch.device) -> "RankGroup":
        """Returns once all have joined. A process can be in one group at a time."""
        if device.type == "cpu" and sys.platform in LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
        dist.init_process_group(
            BACKENDS[device.type],
            store=store,
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        return cls(rank, size)

    def leave(self, whole: bool = True) -> None:
        """Where it is not `whole` any more, NCCL would wait for who is gone: the process ends soon,
        and its part with it."""
        if dist.is_initialized() and (whole or dist.get_backend() == "gloo"):
            dist.destroy_process_group()

    def bounds(self, count: int) -> tuple[int, int]:
        """This rank's of so many: [first, end)."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def sum(self, x: Tensor) -> Tensor:
        """Of all ranks' x, contiguous, in place."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x […, n], in the order of ranks: […, size · n]."""
        rows = x.flatten(0, -2).contiguous()
        parts = rows.new_empty((self.size * len(rows), rows.shape[1]))
        dist.all_gather(list(parts.chunk(self.size)), rows)
        return parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)


def open_store(size: int) -> TCPStore:
    """Where ranks find each other: at a free port that only this machine reaches."""
    with socket.create_server((HOST, 0)) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            HOST,
            port,
            size,
            is_master=True,
            timeout=TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def find_store(port: int, size: int) -> TCPStore:
    return TCPStore(HOST, port, size, is_master=False, timeout=TIMEOUT)

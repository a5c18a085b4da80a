"""RankGroup: collective operations between the ranks of a replica. Carries tensors only.

Backends: gloo on a CPU, NCCL on GPUs. Sums are bit-identical on all ranks, so that all ranks
continue with the same values.
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
# Limit of a collective: the slowest rank may compile a kernel meanwhile. The control sockets detect
# the end of a rank sooner.
TIMEOUT = timedelta(seconds=120)
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Rank of this process, and the number of ranks."""

    rank: int
    size: int

    @classmethod
    def join(cls, rank: int, size: int, store: Store, device: torch.device) -> "RankGroup":
        """Joins the group; returns once all ranks have. A process is in one group at a time."""
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
        """Leaves the group. With `whole` False a rank is lost: NCCL would wait for it, so the group
        is left to the end of the process."""
        if dist.is_initialized() and (whole or dist.get_backend() == "gloo"):
            dist.destroy_process_group()

    def bounds(self, count: int) -> tuple[int, int]:
        """Returns this rank's range of `count` items: [first, end)."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def sum(self, x: Tensor) -> Tensor:
        """Sums x over all ranks in place; x is contiguous."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenates x […, n] of all ranks in rank order: […, size · n]."""
        rows = x.flatten(0, -2).contiguous()
        parts = rows.new_empty((self.size * len(rows), rows.shape[1]))
        dist.all_gather(list(parts.chunk(self.size)), rows)
        return parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)


def open_store(size: int) -> TCPStore:
    """Opens the rendezvous store on a free loopback port."""
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

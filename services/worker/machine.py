"""The worker's share of a machine: its GPU, its share of the cores, and the free host memory."""

import os
from math import inf
from pathlib import Path

import torch

from services.runtime.process_limits import cores

# Tokens of one step by device type: this many fill it, and more only delay decodes. The GPU value
# is an estimate: prefill of a few billion parameters is compute-bound from about there on.
BATCH_TOKENS = {"cpu": 512, "cuda": 2_048}
# Below this number of parameters, handing work to another thread costs more than doing it.
TINY_PARAMETERS = 20_000_000
CGROUP = Path("/sys/fs/cgroup")


def select_device(name: str, rank: int) -> torch.device:
    """The device of a worker by its number on the machine: with `auto` the GPU of that number if
    there are GPUs, else the CPU.

    Raises ValueError with a sentence for a GPU that does not exist.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and count:
        if rank >= count:
            raise ValueError(
                f"worker {rank} has no GPU, because this machine has {count}: start at most "
                f"{count} workers, or let them share a GPU with worker.device=cuda:0"
            )
        return torch.device("cuda", rank)
    device = torch.device("cpu" if name == "auto" else name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(
            f"device is {name}, but PyTorch finds {count} CUDA GPUs: set device to auto or cpu"
        )
    return device


def torch_threads(parameters: int, device: torch.device, local_workers: int) -> int:
    """The number of PyTorch threads; 0: PyTorch's default."""
    if device.type != "cpu":
        return 0
    if parameters < TINY_PARAMETERS:
        return 1
    return cores_per_worker(local_workers) if local_workers > 1 else 0


def cores_per_worker(local_workers: int) -> int:
    return max(1, cores() // local_workers)


def step_token_limit(configured: int, device: torch.device) -> int:
    """Tokens of one step: as configured, or the device type's default."""
    return configured or BATCH_TOKENS[device.type]


def free_host_bytes() -> int:
    """Bytes that this process can still allocate, including file caches: of the machine, or of its
    container if that is less."""
    return int(min(_free_machine_bytes(), _free_container_bytes(CGROUP)))


def _free_machine_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_container_bytes(cgroup: Path) -> float:
    """By the control group (v2); infinite without a limit or accounting."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return inf
    return inf if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))

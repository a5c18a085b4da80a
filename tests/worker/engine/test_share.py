"""A worker's share of a machine: GPU and cores."""

import pytest
import torch

from services.runtime.process_limits import cores
from services.worker.machine import select_device, torch_threads

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Sets the number of GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)


@pytest.mark.parametrize("gpus", [2], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_each_worker_gets_the_gpu_of_its_number():
    assert [select_device("auto", rank) for rank in (0, 1)] == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    assert select_device("cuda:1", 0) == torch.device("cuda", 1)
    assert select_device("cuda", 5) == torch.device("cuda")  # configured to share it
    assert select_device("cpu", 5) == CPU


@pytest.mark.parametrize("gpus", [2], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_worker_without_a_gpu_of_its_own_is_refused():
    with pytest.raises(ValueError, match=r"worker 2 has no GPU, .* at most 2 workers, or let them"):
        select_device("auto", 2)
    with pytest.raises(ValueError, match="device is cuda:2, but PyTorch finds 2 CUDA GPUs: set"):
        select_device("cuda:2", 0)


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_auto_device_without_a_gpu_is_the_cpu():
    assert select_device("auto", 3) == CPU
    with pytest.raises(
        ValueError, match="device is cuda, but PyTorch finds 0 CUDA GPUs: set device to auto or cpu"
    ):
        select_device("cuda", 0)


def test_cores_are_shared_except_by_tiny_models():
    assert torch_threads(1_000, CPU, 1) == 1
    assert torch_threads(10**9, CPU, 1) == 0  # PyTorch's default: all cores
    assert torch_threads(10**9, CPU, 2) == max(1, cores() // 2)
    assert torch_threads(10**9, CPU, 64) == max(1, cores() // 64)
    assert torch_threads(10**9, torch.device("cuda"), 2) == 0

"""Of a machine, what each of its workers takes."""

import pytest
import torch

from services.worker.machine import cores, device_of, threads_of

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A machine that says it has so many."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)


@pytest.mark.parametrize("gpus", [2], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_each_worker_gets_the_gpu_of_its_number():
    assert [device_of("auto", rank) for rank in (0, 1)] == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    assert device_of("cuda:1", 0) == torch.device("cuda", 1)
    assert device_of("cuda", 5) == torch.device("cuda")  # told to share it
    assert device_of("cpu", 5) == CPU


@pytest.mark.parametrize("gpus", [2], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_worker_without_a_gpu_of_its_own_is_refused():
    with pytest.raises(ValueError, match=r"worker 2 has no GPU .* at most 2 workers, or share one"):
        device_of("auto", 2)
    with pytest.raises(ValueError, match="device is cuda:2, but PyTorch finds 2 CUDA GPUs here"):
        device_of("cuda:2", 0)


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_auto_device_without_a_gpu_is_the_cpu():
    assert device_of("auto", 3) == CPU
    with pytest.raises(ValueError, match="device is cuda, but PyTorch finds 0 CUDA GPUs here"):
        device_of("cuda", 0)


def test_cores_are_shared_except_by_tiny_models():
    assert threads_of(1_000, CPU, 1) == 1
    assert threads_of(10**9, CPU, 1) == 0  # all, as PyTorch takes them
    assert threads_of(10**9, CPU, 2) == max(1, cores() // 2)
    assert threads_of(10**9, CPU, 64) == max(1, cores() // 64)
    assert threads_of(10**9, torch.device("cuda"), 2) == 0

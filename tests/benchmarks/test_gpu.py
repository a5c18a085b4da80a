"""The GPU benchmark without a GPU: its message, its checks, and compilation of its kernels."""

import os
import subprocess
import sys

import pytest


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True, text=True, timeout=280, env=environment, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_missing_device_is_reported():
    done = run("benchmarks.gpu")
    assert done.returncode == 1
    assert "no CUDA device is available" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_kernel_checks_run_in_the_interpreter():
    done = run("benchmarks.gpu", "--interpret", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 faults" in done.stdout


@pytest.mark.slow
def test_every_kernel_compiles_for_gpus():
    """Code for Ampere and Hopper within their shared memory; no device runs it."""
    done = run("benchmarks.gpu.compile", "80", "90")
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {line.split()[1] for line in done.stdout.splitlines()}
    assert kernels == {
        "store", "append_blocks", "follow", "decode", "join", "prefill", "quantize", "dequantize",
        "copy",
    }  # fmt: skip

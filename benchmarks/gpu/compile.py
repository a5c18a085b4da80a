"""Compiles every Triton kernel without a GPU.

    python -m benchmarks.gpu.compile 80 90

Triton's compiler needs a driver that names a device, but no device. The kernels do not run. The
benchmark prints the shared memory of a thread block and fails when it exceeds the smallest GPU of
the generation.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu.checks import Case, layout_of, run_fixed, run_step
from benchmarks.gpu.copies import CopyCase, at_rest_faults, round_trip_faults
from services.worker.kernels.cuda import attention as triton_attention
from services.worker.kernels.cuda import blocks as triton_blocks

# Maximum of a thread block by compute capability, including consumer GPUs of the generation.
MAX_SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}

STEP = ((3000, 1), (100, 40))
CASES = [
    Case("GQA of 128", STEP, 32, 8, 128, torch.bfloat16),
    Case("INT8", STEP, 32, 8, 128, torch.bfloat16, int8=True),
    Case("a window, a soft-cap and a head of 256", STEP, 8, 4, 256, torch.float16, 64, 30.0),
    Case("a head of 80", STEP, 4, 4, 80, torch.float16),
    Case("float32", STEP, 4, 2, 64),
]


class StubDriver:
    """A driver that names a GPU and has no device."""

    def __init__(self, capability: int):
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_kernels(capability: int) -> Iterator[tuple[str, str, int]]:
    """Yields (kernel, case, bytes of shared memory) for the options of the worker's calls."""
    compiled: list[tuple[str, int]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.__name__, kernel.metadata.shared))
        return kernel

    with ExitStack() as stack:
        for module in (triton_attention, triton_blocks):
            stack.enter_context(patch.object(module, "require_runnable"))
        stack.enter_context(patch.object(JITFunction, "run", compile_only))
        driver.set_active(StubDriver(capability))  # there may be none to restore
        for name in _launches():
            yield from ((kernel, name, shared) for kernel, shared in compiled)
            compiled.clear()


def _launches() -> Iterator[str]:
    """Launches every kernel and yields the name of each case; nothing is computed."""
    cpu = torch.device("cpu")
    for case in CASES:
        run_step(case, 0, cpu, processors=132)
        yield case.name
        run_fixed(replace(case, shapes=STEP[:1]), 0, cpu, padding=1, processors=132)
        yield f"{case.name}, recorded"
    kernels = triton_attention.TritonAttention(16, cpu, torch.bfloat16)
    batch = layout_of(CASES[0], torch.Generator()).batch
    for _ in range(2):  # the second call finds existing tables
        kernels.prepare(batch, torch.zeros(1))
    yield "a step on"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        copies = CopyCase("", 8, 128, dtype)
        at_rest_faults(copies, 0, cpu)
        round_trip_faults(copies, 0, cpu, int8=False)
        yield str(dtype)
    round_trip_faults(replace(copies, name="INT8"), 0, cpu, int8=True)
    yield "live INT8"


def main() -> int:
    too_large = 0
    for capability in map(int, sys.argv[1:]):
        for kernel, case, shared in compile_kernels(capability):
            fits = shared <= MAX_SHARED_BYTES[capability]
            too_large += not fits
            print(
                f"sm_{capability} {kernel} ({case}): {shared} bytes{'' if fits else ', too many'}"
            )
    return min(too_large, 125)


if __name__ == "__main__":
    sys.exit(main())

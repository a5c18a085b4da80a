"""The dtype that `auto` chooses, by checkpoint and by the device's capabilities."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from services.worker.model import dtypes
from services.worker.model.dtypes import DtypeChoice, choose_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def folder(at: Path, dtype: torch.dtype | None) -> str:
    LlamaConfig(hidden_size=32, dtype=dtype).save_pretrained(at)
    return str(at)


@pytest.mark.parametrize(
    ("checkpoint", "instructions", "expected"),
    [
        (torch.bfloat16, "AMX", DtypeChoice("bfloat16", "the checkpoint's; AMX")),
        (torch.bfloat16, "AVX512-BF16", DtypeChoice("bfloat16", "the checkpoint's; AVX512-BF16")),
        (
            torch.bfloat16,
            "",
            DtypeChoice("float32", "the checkpoint's bfloat16 needs AVX512-BF16 or AMX"),
        ),
        (torch.float32, "AMX", DtypeChoice("float32", "the checkpoint's")),
        (
            torch.float16,
            "AMX",
            DtypeChoice("float32", "no CPU instructions for the checkpoint's float16"),
        ),
        (None, "AMX", DtypeChoice("float32", "the checkpoint declares no dtype")),
    ],
)
def test_auto_dtype_on_a_cpu_follows_checkpoint_and_capability(
    checkpoint: torch.dtype | None,
    instructions: str,
    expected: DtypeChoice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dtypes, "cpu_bfloat16_instructions", lambda: instructions)
    assert choose_dtype(folder(tmp_path, checkpoint), CPU, "auto") == expected


@pytest.mark.parametrize(
    ("checkpoint", "has_bfloat16", "expected"),
    [
        (torch.bfloat16, True, DtypeChoice("bfloat16", "the checkpoint's; the GPU's bfloat16")),
        (
            torch.bfloat16,
            False,
            DtypeChoice("float32", "the checkpoint's bfloat16 needs a newer GPU"),
        ),
        (torch.float16, False, DtypeChoice("float16", "the checkpoint's")),
        (torch.float32, True, DtypeChoice("float32", "the checkpoint's")),
    ],
)
def test_auto_dtype_on_a_gpu_follows_checkpoint_and_capability(
    checkpoint: torch.dtype,
    has_bfloat16: bool,
    expected: DtypeChoice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dtypes, "cuda_has_bfloat16", lambda _: has_bfloat16)
    assert choose_dtype(folder(tmp_path, checkpoint), CUDA, "auto") == expected


def test_configured_dtype_is_used_on_any_device(tmp_path: Path) -> None:
    name = folder(tmp_path, torch.bfloat16)
    for device in (CPU, CUDA):
        assert choose_dtype(name, device, "float16") == DtypeChoice("float16", "configured")


def test_cpu_capability_is_that_of_the_processor() -> None:
    flags = Path("/proc/cpuinfo")
    if not flags.exists():
        pytest.skip("reads the processor's flags from /proc/cpuinfo")
    listed = flags.read_text().split()
    named = {"AMX": "amx_tile", "AVX512-BF16": "avx512_bf16"}
    chosen = dtypes.cpu_bfloat16_instructions()
    assert not chosen or named[chosen] in listed

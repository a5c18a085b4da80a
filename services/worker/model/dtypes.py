"""The dtype in which a model computes.

`auto` follows vLLM's convention: the checkpoint's dtype where the device has the instructions for
it, else float32. The choice depends on the device's capabilities and never on a timing, so that two
workers on the same kind of machine give the same answers.
"""

from dataclasses import dataclass

import torch
from transformers import AutoConfig

FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A dtype by name, and why it was chosen, for the ready line and the log."""

    dtype: str
    reason: str


def choose_dtype(name: str, device: torch.device, requested: str) -> DtypeChoice:
    """The dtype to load model `name` with. `requested` is a dtype's name, or `auto`."""
    if requested != "auto":
        return DtypeChoice(requested, "configured")
    checkpoint = AutoConfig.from_pretrained(name).get_text_config().dtype
    if checkpoint is None:
        return DtypeChoice(FLOAT32, "the checkpoint declares no dtype")
    stored = str(checkpoint).removeprefix("torch.")
    on_gpu = device.type == "cuda"
    if checkpoint is torch.bfloat16:
        if on_gpu:
            instructions = "the GPU's bfloat16" if cuda_has_bfloat16(device) else ""
        else:
            instructions = cpu_bfloat16_instructions()
        if instructions:
            return DtypeChoice(stored, f"the checkpoint's; {instructions}")
        missing = "a newer GPU" if on_gpu else "AVX512-BF16 or AMX"
        return DtypeChoice(FLOAT32, f"the checkpoint's {stored} needs {missing}")
    if on_gpu or checkpoint is torch.float32:
        return DtypeChoice(stored, "the checkpoint's")
    return DtypeChoice(FLOAT32, f"no CPU instructions for the checkpoint's {stored}")


def cpu_bfloat16_instructions() -> str:
    """The processor's instructions for bfloat16 products; empty without any."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else ""


def cuda_has_bfloat16(device: torch.device) -> bool:
    """Whether the GPU computes bfloat16 without emulation."""
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

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
    own = str(checkpoint).removeprefix("torch.")
    if checkpoint is torch.float32:
        return DtypeChoice(FLOAT32, "the checkpoint's")
    if checkpoint is torch.bfloat16:
        if device.type == "cuda":
            supported, instructions = cuda_has_bfloat16(device), "the GPU's bfloat16"
        else:
            instructions = cpu_bfloat16_instructions()
            supported = bool(instructions)
        if supported:
            return DtypeChoice(own, f"the checkpoint's; {instructions}")
        missing = "a newer GPU" if device.type == "cuda" else "AVX512-BF16 or AMX"
        return DtypeChoice(FLOAT32, f"the checkpoint's {own} needs {missing}")
    if device.type == "cuda":
        return DtypeChoice(own, "the checkpoint's")
    return DtypeChoice(FLOAT32, f"no CPU instructions for the checkpoint's {own}")


def cpu_bfloat16_instructions() -> str:
    """The processor's instructions for bfloat16 products; empty without any."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else ""


def cuda_has_bfloat16(device: torch.device) -> bool:
    """Whether the GPU computes bfloat16 without emulation."""
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

"""The model families that the fused forward computes, and their differences.

A model qualifies only if each of its modules is exactly of a known class. A replacement, such as an
adapter, a quantised linear map or another activation, has another class, and the model then runs
through transformers' forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
COMMON: frozenset[type] = frozenset(
    (nn.ModuleList, nn.Linear, nn.Embedding, nn.Dropout, nn.SiLU, SiLUActivation)
)
# Rope with frequencies that do not depend on the sequence length. "dynamic" and "longrope" change
# them with the longest sequence of a batch.
STEADY_ROPE = frozenset(("default", "linear", "llama3", "yarn"))

Window = Callable[[Any], int | None]  # the sliding window of an attention module


@dataclass(frozen=True)
class Layout:
    """A model family: classes `prefix` + PARTS of transformers' module `source`; names of linear
    maps with the same input; the attention window; whether queries and keys have norms."""

    source: str
    prefix: str
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    window: Window = lambda _: None
    head_norms: bool = False

    @property
    def linear_names(self) -> tuple[tuple[str, ...], ...]:
        """The linear maps of a layer that are joined to one, in the order of the forward."""
        return (
            tuple(f"self_attn.{name}" for name in self.qkv),
            ("self_attn.o_proj",),
            tuple(f"mlp.{name}" for name in self.gate_up),
            ("mlp.down_proj",),
        )

    def classes(self) -> frozenset[type]:
        source = import_module(f"transformers.models.{self.source}")
        return COMMON | {getattr(source, self.prefix + part) for part in PARTS}


_LAYER_WINDOW = attrgetter("sliding_window")
_CONFIG_WINDOW = attrgetter("config.sliding_window")


LAYOUTS = {
    "LlamaForCausalLM": Layout("llama.modeling_llama", "Llama"),
    "Qwen2ForCausalLM": Layout("qwen2.modeling_qwen2", "Qwen2", window=_LAYER_WINDOW),
    "Qwen3ForCausalLM": Layout(
        "qwen3.modeling_qwen3", "Qwen3", window=_LAYER_WINDOW, head_norms=True
    ),
    "MistralForCausalLM": Layout("mistral.modeling_mistral", "Mistral", window=_CONFIG_WINDOW),
    "Phi3ForCausalLM": Layout(
        "phi3.modeling_phi3",
        "Phi3",
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        window=_CONFIG_WINDOW,
    ),
}


def find_layout(module: PreTrainedModel, sharded: bool = False) -> Layout | str:
    """The module's layout, or why it has none, as a phrase about the model. A module that is
    `sharded` over ranks has hooks, which the fused forward handles."""
    name = type(module).__name__
    layout = LAYOUTS.get(name)
    if layout is None:
        return f"{name} has another layout"
    if sharded and len(layout.qkv) == 1:
        return "its joined projections cannot be sharded by head"
    return (
        _find_unknown_part(module, layout.classes(), sharded)
        or _find_unsupported_setting(module)
        or layout
    )


def _find_unknown_part(module: nn.Module, known: frozenset[type], sharded: bool) -> str:
    for part in module.modules():
        if type(part) not in known:
            return f"it contains a {type(part).__module__}.{type(part).__qualname__}"
        if not sharded and (part._forward_hooks or part._forward_pre_hooks):
            return f"a hook is set on its {type(part).__name__}"
    return ""


def _find_unsupported_setting(module: PreTrainedModel) -> str:
    rope: str = module.model.rotary_emb.rope_type
    if rope not in STEADY_ROPE:
        return f"its rope ({rope}) depends on length"
    if (module.tp_size or 1) > 1:
        return "it is split over several devices"
    kinds: set[tuple[type, torch.dtype, torch.device]] = {
        (type(weight), weight.dtype, weight.device) for weight in module.parameters()
    }
    if len(kinds) > 1 or next(iter(kinds))[0] is not nn.Parameter:
        return "its weights are of several kinds"
    return ""

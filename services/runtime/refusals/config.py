"""Why a model cannot be served, by the values of its config.

Each check returns a predicate about the model that names the reason and the way out, such as "is
quantized with AWQ, which …: serve …", or an empty string. A caller writes the subject before it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Parts of the names of classes with a head that generates text.
GENERATING = ("CausalLM", "LMHead", "ConditionalGeneration", "BertGenerationDecoder")
OTHER_FAMILY = "serve a model of a family that docs/models.md lists"
KEEPS_STATE = "keep a state beside keys and values, which the paged KV cache does not hold"
SELECTS_KEYS = "attend to selected keys, which the paged attention kernels do not support"
# What foretoken lacks for a kind of layer, by transformers' names for `layer_types`.
UNSUPPORTED_LAYERS = {
    "linear_attention": KEEPS_STATE,
    "mamba": KEEPS_STATE,
    "conv": KEEPS_STATE,
    "hybrid": KEEPS_STATE,
    "hybrid_sliding": KEEPS_STATE,
    "chunked_attention": SELECTS_KEYS,
    "indexed_attention": SELECTS_KEYS,
    "deepseek_sparse_attention": SELECTS_KEYS,
    "compressed_sparse_attention": SELECTS_KEYS,
    "heavily_compressed_attention": SELECTS_KEYS,
    "minimax_m3_sparse": SELECTS_KEYS,
}
SINKS = "has attention sinks, which the paged attention kernels do not support: " + OTHER_FAMILY
UNSUPPORTED_TYPES = {"gpt_oss": SINKS}


def find_config_fault(config: Mapping[str, Any]) -> str:
    """Why foretoken cannot serve a model with this config.json, or with these values of a loaded
    config; empty if no reason is known."""
    whole = {**_section(config, "text_config"), **config}  # what only the text part has, too
    faults = (check(whole) for check in CONFIG_CHECKS)
    return next((fault for fault in faults if fault), "")


def find_head_fault(architectures: Sequence[str]) -> str:
    """Why none of the named classes generates text; empty if one does, or none is named."""
    if not architectures or any(part in name for name in architectures for part in GENERATING):
        return ""
    return (
        f"is a {architectures[0]}, which generates no text: serve a checkpoint of a causal "
        "language model (…ForCausalLM)"
    )


def _find_kind_fault(config: Mapping[str, Any]) -> str:
    """Encoder-decoder models, and heads that generate no text."""
    if config.get("is_encoder_decoder"):
        kind = config.get("model_type", "model")
        return (
            f"is an encoder-decoder model ({kind}), and foretoken serves decoder-only models: "
            + OTHER_FAMILY
        )
    named = config.get("architectures")
    return find_head_fault([str(name) for name in named] if isinstance(named, list) else ())


def _find_attention_fault(config: Mapping[str, Any]) -> str:
    if fault := UNSUPPORTED_TYPES.get(str(config.get("model_type"))):
        return fault
    given = config.get("layer_types")
    kinds = [str(kind) for kind in given] if isinstance(given, list) else []
    known = [kind for kind in kinds if kind in UNSUPPORTED_LAYERS]
    if not known:
        return ""
    kind = known[0]
    return (
        f"has layers of the kind {kind} ({kinds.count(kind)} of {len(kinds)}), which "
        f"{UNSUPPORTED_LAYERS[kind]}: {OTHER_FAMILY}"
    )


def _find_quantization(config: Mapping[str, Any]) -> str:
    """MLX writes `quantization`, without a method."""
    settings = _section(config, "quantization_config")
    if settings:
        return quantized(str(settings.get("quant_method") or "an unnamed method"))
    return quantized("MLX") if _section(config, "quantization") else ""


def quantized(method: str) -> str:
    """The refusal of a checkpoint that is quantized with this method."""
    label = method.upper() if len(method) <= 4 else method  # AWQ, GPTQ, FP8; bitsandbytes
    return (
        f"is quantized with {label}, which foretoken does not read: serve the unquantized "
        "checkpoint"
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


# Attention comes before quantization: an unquantized checkpoint would not help.
CONFIG_CHECKS: tuple[Callable[[Mapping[str, Any]], str], ...] = (
    _find_kind_fault,
    _find_attention_fault,
    _find_quantization,
)

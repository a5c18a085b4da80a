"""Refuses a model that the worker cannot serve, before its weights are read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers import __version__ as transformers_version

from services.runtime.refusals.config import OTHER_FAMILY, find_config_fault
from services.runtime.refusals.folder import find_model_fault, read_config

MAX_ERROR_CHARS = 300  # of an error message from another library


@contextmanager
def explained_load_errors(name: str) -> Iterator[None]:
    """Context that converts any error into a ValueError that names the model."""
    try:
        yield
    except SafetensorError as error:
        why = f"a file of its weights is broken ({error}): download it again"
        raise ValueError(f"cannot load model {name!r}: {why}") from error
    except KeyError as error:  # a name that transformers does not have, such as of an activation
        why = f"its config.json names {error}, which transformers {transformers_version} lacks"
        raise ValueError(f"cannot load model {name!r}: {why}") from error
    except Exception as error:  # any other error of transformers or json about a bad folder
        why = " ".join(str(error).split())[:MAX_ERROR_CHARS] or type(error).__name__
        raise ValueError(f"cannot load model {name!r}: {why}") from error


def require_supported(name: str) -> None:
    """Raises ValueError, with a sentence that says what to change, if a folder lacks a file, or a
    folder's or Hub model's config describes a model that foretoken does not serve."""
    folder = Path(name)
    if folder.is_dir():
        fault = find_model_fault(folder) or _find_unknown_type(folder)
    elif name.count("/") > 1 or name.startswith(("/", ".", "~")):
        raise ValueError("the folder does not exist")
    else:
        fault = ""
    if not fault:
        config = AutoConfig.from_pretrained(name)
        fault = find_config_fault(_complete(config)) or _find_class_fault(config)
    if fault:
        raise ValueError(f"it {fault}")


def require_loaded(loaded: Mapping[str, Any]) -> None:
    """Raises ValueError if a model's files lack weights or have others, as transformers reports."""
    remedy = "copy both config.json and the weights from the original checkpoint"
    if missing := sorted(loaded["missing_keys"]):
        raise ValueError(
            f"its files lack weights, such as {missing[0]} ({len(missing)} in all): {remedy}"
        )
    if other := sorted(loaded["mismatched_keys"]):
        weight, stored, wanted = other[0]
        raise ValueError(
            f"its files have weights of another shape than its config.json says, such as {weight}, "
            f"{list(stored)} instead of {list(wanted)} ({len(other)} in all): {remedy}"
        )


def _complete(config: PreTrainedConfig) -> Mapping[str, Any]:
    """The config of a model's text part, with the kinds of layers, which config.json may omit."""
    text = config.get_text_config()
    values: dict[str, Any] = text.to_dict()
    kinds = getattr(text, "layer_types", None)
    return values if kinds is None else values | {"layer_types": list(kinds)}


def _find_unknown_type(folder: Path) -> str:
    kind = read_config(folder).get("model_type")
    if kind in CONFIG_MAPPING:
        return ""
    if kind is None:
        return "has no model_type in its config.json: copy the original checkpoint's config.json"
    return (
        f"is of the type {kind}, which transformers {transformers_version} does not contain: "
        f"upgrade transformers, or {OTHER_FAMILY} (code in a model's folder is not run)"
    )


def _find_class_fault(config: PreTrainedConfig) -> str:
    """A config without a causal language model, or with attention that cannot be replaced."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return (
            f"is of the type {config.model_type}, which transformers does not load as a causal "
            f"language model: {OTHER_FAMILY}"
        )
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    classes = found if isinstance(found, tuple) else (found,)
    # Private: without it, the probe after loading finds the same.
    checks = (getattr(kind, "_can_set_attn_implementation", lambda: True) for kind in classes)
    return "" if any(check() for check in checks) else own_attention(classes[0].__name__)


def own_attention(name: str) -> str:
    """The refusal of a class that does not call transformers' AttentionInterface."""
    return (
        f"is a {name}, which computes attention in code of its own, where foretoken cannot use its "
        f"paged KV cache: {OTHER_FAMILY}"
    )

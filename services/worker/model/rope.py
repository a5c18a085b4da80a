"""Freezes rope frequencies that would otherwise depend on the longest sequence of a batch.

In each forward, transformers chooses the frequencies of two rope types by the longest position
(`modeling_rope_utils.dynamic_rope_update`): `dynamic` beyond max_position_embeddings, `longrope`
beyond original_max_position_embeddings. A batch is one forward here. A long request would therefore
change the rotation of the other requests, and would not match the keys in its cache. If no sequence
can exceed that bound, the frequencies are constant.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

DEFAULT_TYPE = "default"  # transformers never updates frequencies of this type


def freeze_rope(module: PreTrainedModel, context_tokens: int) -> None:
    """Fixes the rotation of a model that serves sequences of at most `context_tokens`.

    Raises ValueError, with a sentence that says what to change, if its frequencies would depend on
    other requests of the batch.
    """
    for kind, bound in _length_dependent(module.config.get_text_config()):
        if context_tokens > bound:
            raise ValueError(
                f"its {kind} rope depends on the longest request of a batch beyond {bound} tokens, "
                "so that answers would depend on other requests: set max_context_tokens to at most "
                f"{bound}"
            )
    for part in module.modules():
        _freeze(part)


def _length_dependent(config: object) -> Iterator[tuple[str, int]]:
    """Yields each length-dependent rope: its type, and the length up to which it is constant."""
    limit = _tokens(config, "max_position_embeddings")
    for rope in _ropes(config):
        kind = str(rope.get("rope_type") or rope.get("type"))
        if "dynamic" in kind:
            yield kind, limit
        elif kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            own = _tokens(config, "original_max_position_embeddings") or limit
            yield kind, original if isinstance(original, int) else own


def _ropes(config: object) -> Iterator[Mapping[str, object]]:
    """Yields a model's rope parameters: one set, or one set per type of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, Mapping):
        yield parameters
        yield from (rope for rope in parameters.values() if isinstance(rope, Mapping))


def _tokens(config: object, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _freeze(part: Any) -> None:
    """Sets a rotary embedding's `rope_type`, one or one per type of layer, to a constant one.
    Otherwise the host would wait at every step for the longest position."""
    kind = getattr(part, "rope_type", None)
    if isinstance(kind, str):
        part.rope_type = _frozen_type(kind)
    elif isinstance(kind, dict):
        part.rope_type = {layer: _frozen_type(own) for layer, own in kind.items()}


def _frozen_type(kind: str) -> str:
    return DEFAULT_TYPE if "dynamic" in kind or kind == "longrope" else kind

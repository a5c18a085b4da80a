"""Freezes rope frequencies that would otherwise depend on the longest sequence of a batch.

transformers chooses the frequencies of two rope types anew in each forward, by the longest position
in it (`modeling_rope_utils.dynamic_rope_update`): `dynamic` beyond max_position_embeddings,
`longrope` beyond original_max_position_embeddings. A batch is one forward here, so a long request
would change the rotation of its neighbours and no longer match its own cached keys. While no
sequence can pass that bound, there is one constant set of frequencies.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

DEFAULT_TYPE = "default"  # transformers never updates frequencies of this type


def freeze_rope(module: PreTrainedModel, context_tokens: int) -> None:
    """Fix the rotation of a model that serves sequences of at most `context_tokens`.

    Raises ValueError, one sentence that says what to change, if its frequencies would depend
    on other requests of the batch.
    """
    for kind, bound in _length_dependent(module.config.get_text_config()):
        if context_tokens > bound:
            raise ValueError(
                f"its {kind} rope turns all requests of a batch by the length of the longest, once "
                f"that passes {bound} tokens, so that neighbours would change each other's "
                f"answers: set max_context_tokens to at most {bound}"
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
    """A model's rope parameters (`rope_scaling` is transformers' other name of them): one set, or
    one a type of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, Mapping):
        yield parameters
        yield from (rope for rope in parameters.values() if isinstance(rope, Mapping))


def _tokens(config: object, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _freeze(part: Any) -> None:
    """Of a rotary embedding, whose `rope_type` is one or one a type of layer, the frequencies stay:
    to look for the longest position would have the host wait for the device at every step."""
    kind = getattr(part, "rope_type", None)
    if isinstance(kind, str):
        part.rope_type = _frozen_type(kind)
    elif isinstance(kind, dict):
        part.rope_type = {layer: _frozen_type(own) for layer, own in kind.items()}


def _frozen_type(kind: str) -> str:
    return DEFAULT_TYPE if "dynamic" in kind or kind == "longrope" else kind

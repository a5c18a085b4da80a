"""Attention over paged blocks, in place of that of transformers' unchanged modules.

Their forward receives the step as a keyword argument.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from torch import Tensor, nn
from torch.nn.functional import pad

from services.runtime.refusals.config import OTHER_FAMILY, SINKS
from services.worker.kernels.interface import AttentionKernels, AttentionOptions, AttentionStep
from services.worker.kv.cache import KVCache
from services.worker.model.probe import UnsupportedAttention

ATTENTION = "foretoken_paged"  # the name of `paged_attention` in transformers
NOTHING_PASSED = (
    "does not pass the arguments of its forward on to its attention, so that foretoken cannot use "
    "its paged KV cache: " + OTHER_FAMILY
)


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Attention over the cache, for the batch that `kernels` were prepared for."""

    cache: KVCache
    kernels: AttentionKernels

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        blocks = self.cache.layers[layer]
        self.kernels.store(blocks, k, v)
        return self.kernels.attend(blocks, q, k, v, options)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    foretoken: AttentionStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, heads, Σ tokens, head_dim] → [1, Σ, heads,
    value_dim].

    `s_aux` holds attention sinks, `unused` arguments of other backends and of training (dropout,
    position_ids …). Raises UnsupportedAttention for sinks, and for a model that does not pass
    `foretoken` on from its forward.
    """
    if s_aux is not None:
        raise UnsupportedAttention(SINKS)
    if foretoken is None:
        raise UnsupportedAttention(NOTHING_PASSED)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = _options(scale, sliding_window, softcap)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    head_dim, value_dim = k.shape[-1], v.shape[-1]
    if value_dim < head_dim:  # latent attention (MLA): zeros fill the values in the cache
        v = pad(v, (0, head_dim - value_dim))
    attended = foretoken.attend(cast(int, module.layer_idx), q, k, v, options)
    return attended[None, ..., :value_dim], None


@lru_cache(maxsize=64)  # called once per layer and step, with one value per kind of layer
def _options(scale: float, window: int | None, softcap: float | None) -> AttentionOptions:
    return AttentionOptions(scale, window, softcap)

"""A fused forward for the decoder layout that Llama, Qwen2, Qwen3, Mistral and Phi-3 share.

Per layer: one GEMM for queries, keys and values, one for gate and up; residual sums inside the
GEMMs; norm, rotation and gate by one call each (layer_ops.py); after the last layer's attention
only the rows whose logits are needed. Weights are the module's own. Where several are joined, the
module's parameters become views of the joined one: except for a small output head and head norms
nothing is stored twice, and transformers' forward still runs. No call waits for the device, and no
shape depends on data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from services.worker.kernels.interface import AttentionOptions, AttentionStep
from services.worker.model.fused_layouts import Layout
from services.worker.model.layer_ops import LayerOps
from services.worker.model.rank_group import RankGroup

# Bytes of a table of rotations: that of a long context (131,072 positions of 128 numbers, bfloat16)
# just fits. Above it each step computes its rotations, once for all layers.
ROTARY_TABLE_BYTES = 64 * 2**20
# Size of a weight that a CPU reads fastest in input-major layout (measured with one thread in
# float32 and bfloat16: up to twice as fast for 1 to 64 rows): it fits in a core's cache, and its
# products are computed by kernels/cpu/matmul.py if possible.
BY_INPUT_NUMBERS = 2**19


@dataclass(frozen=True, slots=True)
class Linear:
    """x · weight + bias, for x [rows, in]; `weight` [in, out] is a view of the module's own, except
    for a small output head. With `ranks`, each rank has some of the inputs, and the results of all
    ranks are summed."""

    weight: Tensor
    bias: Tensor | None
    ranks: RankGroup | None = None

    def project(self, ops: LayerOps, x: Tensor) -> Tensor:
        return ops.product(x, self.weight, self.bias)

    def add_to(self, ops: LayerOps, total: Tensor, x: Tensor) -> None:
        """total += product(x), summed by the GEMM itself."""
        if self.ranks is not None:
            total.add_(self.ranks.sum(self.project(ops, x)))
            return
        ops.add_product(total, x, self.weight)
        if self.bias is not None:
            total.add_(self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm's weight, [numbers]; of queries and keys [heads + kv_heads, head_dim]."""

    weight: Tensor
    eps: float


class Rotary:
    """cos and sin of every position, with the module's own frequencies and scaling.

    The first half of each sin is negated: rotate_half(x) · sin is then x with swapped halves, times
    this.
    """

    def __init__(self, rotary: Any, positions: int, dtype: torch.dtype):
        self._frequencies: Tensor = rotary.inv_freq.float()
        self._scaling: float = rotary.attention_scaling
        self._dtype = dtype
        row_bytes = 4 * len(self._frequencies) * dtype.itemsize
        self._table: Tensor | None = None
        if positions * row_bytes <= ROTARY_TABLE_BYTES:
            self._table = self._rotations(torch.arange(positions, device=self._frequencies.device))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[Σ tokens, 1, rotated dimensions], cos and sin."""
        if self._table is None:
            turns = self._rotations(positions)
        else:
            turns = self._table.index_select(0, positions)
        cos, sin = turns.unsqueeze(1).chunk(2, -1)
        return cos, sin

    def _rotations(self, positions: Tensor) -> Tensor:
        angles = positions.unsqueeze(-1).float() * self._frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return torch.cat([cos, cos, -sin, sin], -1).to(self._dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. `hidden` [Σ tokens, hidden size] is the residual stream."""

    index: int
    options: AttentionOptions
    heads: int
    kv_heads: int
    head_dim: int
    attention_norm: Norm
    qkv: Linear
    head_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear

    def project(
        self, ops: LayerOps, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [Σ tokens, heads, head_dim], as strided slices of one product."""
        normed = ops.norm(hidden, self.attention_norm.weight, self.attention_norm.eps)
        qkv = self.qkv.project(ops, normed).view(len(hidden), -1, self.head_dim)
        weight, eps = (self.head_norm.weight, self.head_norm.eps) if self.head_norm else (None, 0.0)
        turned = ops.turn(qkv, self.heads + self.kv_heads, weight, eps, cos, sin)
        return turned[:, : self.heads], turned[:, self.heads :], qkv[:, -self.kv_heads :]

    def finish(self, ops: LayerOps, hidden: Tensor, attended: Tensor) -> None:
        """Adds the output projection of attention [Σ tokens, heads · head_dim] and the MLP to
        `hidden`."""
        self.output.add_to(ops, hidden, attended)
        normed = ops.norm(hidden, self.mlp_norm.weight, self.mlp_norm.eps)
        self.down.add_to(ops, hidden, ops.gated(self.gate_up.project(ops, normed)))


class FusedForward:
    """`module`'s forward with few calls. Rotations are precomputed for `positions`. `ranks` is set
    if the module is one rank's part."""

    def __init__(
        self,
        module: PreTrainedModel,
        layout: Layout,
        positions: int,
        ops: LayerOps,
        ranks: RankGroup | None = None,
    ):
        self._ops = ops
        decoder = module.model
        # The module itself if it is split over ranks, where a lookup needs communication.
        self._embed: Callable[[Tensor], Tensor] = decoder.embed_tokens
        if ranks is None:
            self._embed = partial(embedding, weight=decoder.embed_tokens.weight)
        self._ranks = ranks
        self._vocabulary: int = module.config.get_text_config().vocab_size
        self._rotary = Rotary(decoder.rotary_emb, positions, module.dtype)
        self.layers = [
            _layer_of(layer, layout, ranks)
            for layer in decoder.layers[: module.config.num_hidden_layers]
        ]
        self._norm = _norm_of(decoder.norm)
        self._head = Linear(_head_weight(module.lm_head), module.lm_head.bias)

    def __call__(
        self, tokens: Tensor, positions: Tensor, step: AttentionStep, rows: Tensor | None
    ) -> Tensor:
        """Logits [rows, vocabulary] of the packed batch; of all its tokens if `rows` is None."""
        hidden, cos, sin = self.embed(tokens, positions)
        ops, last = self._ops, self.layers[-1]
        for layer in self.layers:
            q, k, v = layer.project(ops, hidden, cos, sin)
            attended = step.attend(layer.index, q, k, v, layer.options).flatten(1)
            if layer is last and rows is not None:
                hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
            layer.finish(ops, hidden, attended)
        return self.logits(ops, hidden)

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The initial residual stream, and the rotations cos and sin."""
        return self._embed(tokens), *self._rotary.at(positions)

    def logits(self, ops: LayerOps, hidden: Tensor) -> Tensor:
        """Logits of rows that have passed all layers."""
        logits = self._head.project(ops, ops.norm(hidden, self._norm.weight, self._norm.eps))
        if self._ranks is None or logits.shape[-1] == self._vocabulary:
            return logits
        return self._ranks.all_gather(logits)


def joined(linears: Sequence[nn.Linear]) -> Linear:
    """The joined linear map of several `linears` with the same input.

    Their parameters move into it and become views of it. Peak memory is one additional map of this
    size.
    """
    biased = linears[0].bias is not None
    return Linear(_moved(linears, "weight").t(), _moved(linears, "bias") if biased else None)


def _moved(linears: Sequence[nn.Linear], name: str) -> Tensor:
    """[out, in], or [out] for a bias."""
    parts: list[Tensor] = [getattr(linear, name).detach() for linear in linears]
    numbers = sum(part.numel() for part in parts)
    by_input = parts[0].device.type == "cpu" and numbers <= BY_INPUT_NUMBERS
    if len(parts) == 1 and (parts[0].ndim == 1 or not by_input):
        return parts[0]
    whole = torch.cat(parts)
    if whole.ndim == 2 and by_input:
        whole = whole.t().contiguous().t()
    start = 0
    for linear, part in zip(linears, parts, strict=True):
        view = whole[start : start + len(part)]
        setattr(linear, name, nn.Parameter(view, requires_grad=False))
        start += len(part)
    return whole


def _head_weight(head: nn.Linear) -> Tensor:
    """[in, out]. If it is also the embedding, which is read by rows, a small one is stored
    twice."""
    weight = head.weight.detach().t()
    small = weight.device.type == "cpu" and weight.numel() <= BY_INPUT_NUMBERS
    return weight.contiguous() if small else weight


def _layer_of(layer: Any, layout: Layout, ranks: RankGroup | None) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_dim: int = attention.head_dim
    qkv = joined([getattr(attention, name) for name in layout.qkv])
    heads: int = attention.o_proj.in_features // head_dim  # of this rank
    kv_heads = (qkv.weight.shape[1] // head_dim - heads) // 2
    fused = Layer(
        index=attention.layer_idx,
        options=AttentionOptions(attention.scaling, layout.window(attention)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        attention_norm=_norm_of(layer.input_layernorm),
        qkv=qkv,
        head_norm=_head_norm_of(attention, heads, kv_heads) if layout.head_norms else None,
        output=replace(joined([attention.o_proj]), ranks=ranks),
        mlp_norm=_norm_of(layer.post_attention_layernorm),
        gate_up=joined([getattr(mlp, name) for name in layout.gate_up]),
        down=replace(joined([mlp.down_proj]), ranks=ranks),
    )
    if fused.qkv.weight.device.type == "cuda":
        torch.cuda.empty_cache()  # the freed parts fit no later allocation and would stay cached
    return fused


def _norm_of(norm: Any) -> Norm:
    return Norm(norm.weight.detach(), norm.variance_epsilon)


def _head_norm_of(attention: Any, heads: int, kv_heads: int) -> Norm:
    """A few numbers per head, stored twice so that queries and keys are normalised in one call."""
    q, k = attention.q_norm, attention.k_norm
    weight = torch.cat([q.weight.expand(heads, -1), k.weight.expand(kv_heads, -1)]).detach()
    return Norm(weight, q.variance_epsilon)

"""A forward of our own for the decoder layout that Llama, Qwen2, Qwen3, Mistral and Phi-3 share.

Per layer: one GEMM for queries, keys and values, one for gate and up; residual sums inside the
GEMMs; norm, rotation and gate by one call each (layer_ops.py); behind the last layer's attention
only the rows whose logits are asked for. Weights are the module's own. Where several are laid side
by side, the module's parameters become views of the whole: but for a small head and norms of heads
nothing is kept twice, and transformers' forward still runs. No call waits for the device, and no
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
from services.worker.model.sharding import Collectives

# Of a table of rotations: a long context's (131,072 positions of 128 numbers, bfloat16) just fits.
# Beyond it a step computes its own, once for all layers.
ROTARY_TABLE_BYTES = 64 * 2**20
# Of a weight that a CPU reads fastest when it lies input by input (measured, one thread, float32
# and bfloat16: up to twice as fast for 1 to 64 rows): a core's own cache holds it, and products of
# it are computed here where they can be (kernels/cpu/matmul.py).
BY_INPUT_NUMBERS = 2**19


@dataclass(frozen=True, slots=True)
class Linear:
    """x · weight + bias, for x [rows, in]; `weight` [in, out] is a view of the module's own, but a
    small head's.
    With `ranks`, each has some of the inputs, and what is added is all their sum."""

    weight: Tensor
    bias: Tensor | None
    ranks: Collectives | None = None

    def of(self, ops: LayerOps, x: Tensor) -> Tensor:
        return ops.product(x, self.weight, self.bias)

    def add_to(self, ops: LayerOps, total: Tensor, x: Tensor) -> None:
        """total += of(x), summed by the GEMM itself."""
        if self.ranks is not None:
            total.add_(self.ranks.sum(self.of(ops, x)))
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
    """cos and sin of every position, by the module's own frequencies and scaling.

    The first half of each sin is negative: rotate_half(x) · sin is then x, its halves swapped,
    times this.
    """

    def __init__(self, rotary: Any, positions: int, dtype: torch.dtype):
        self._frequencies: Tensor = rotary.inv_freq.float()
        self._scaling: float = rotary.attention_scaling
        self._dtype = dtype
        row_bytes = 4 * len(self._frequencies) * dtype.itemsize
        self._table: Tensor | None = None
        if positions * row_bytes <= ROTARY_TABLE_BYTES:
            self._table = self._turns(torch.arange(positions, device=self._frequencies.device))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[Σ tokens, 1, dimensions that turn], cos and sin."""
        if self._table is None:
            turns = self._turns(positions)
        else:
            turns = self._table.index_select(0, positions)
        cos, sin = turns.unsqueeze(1).chunk(2, -1)
        return cos, sin

    def _turns(self, positions: Tensor) -> Tensor:
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
        """q, k, v [Σ tokens, heads, head_dim], strided: slices of one product."""
        normed = ops.norm(hidden, self.attention_norm.weight, self.attention_norm.eps)
        qkv = self.qkv.of(ops, normed).view(len(hidden), -1, self.head_dim)
        weight, eps = (self.head_norm.weight, self.head_norm.eps) if self.head_norm else (None, 0.0)
        turned = ops.turn(qkv, self.heads + self.kv_heads, weight, eps, cos, sin)
        return turned[:, : self.heads], turned[:, self.heads :], qkv[:, -self.kv_heads :]

    def finish(self, ops: LayerOps, hidden: Tensor, attended: Tensor) -> None:
        """Add to `hidden` what attention [Σ tokens, heads · head_dim] and the MLP give."""
        self.output.add_to(ops, hidden, attended)
        normed = ops.norm(hidden, self.mlp_norm.weight, self.mlp_norm.eps)
        self.down.add_to(ops, hidden, ops.gated(self.gate_up.of(ops, normed)))


class FusedForward:
    """`module`'s forward, computed with few calls. Rotations of `positions` are kept at hand.
    `ranks`, where the module is one of their parts."""

    def __init__(
        self,
        module: PreTrainedModel,
        layout: Layout,
        positions: int,
        ops: LayerOps,
        ranks: Collectives | None = None,
    ):
        self._ops = ops
        decoder = module.model
        # The module where it is cut: looking up is then more than that.
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
        """The residual stream's beginning, and rotations: cos and sin."""
        return self._embed(tokens), *self._rotary.at(positions)

    def logits(self, ops: LayerOps, hidden: Tensor) -> Tensor:
        """Of rows that have passed all layers."""
        logits = self._head.of(ops, ops.norm(hidden, self._norm.weight, self._norm.eps))
        if self._ranks is None or logits.shape[-1] == self._vocabulary:
            return logits
        return self._ranks.all_gather(logits)


def joined(linears: Sequence[nn.Linear]) -> Linear:
    """What the `linears` of one input give, side by side, as one map.

    Their parameters are moved into it and become views of it. Peak memory is one such map more.
    """
    biased = linears[0].bias is not None
    return Linear(_moved(linears, "weight").t(), _moved(linears, "bias") if biased else None)


def _moved(linears: Sequence[nn.Linear], name: str) -> Tensor:
    """[out, in], or [out] of a bias."""
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
    """[in, out]. It may be the embedding, too, which is read by rows: a small one is kept twice."""
    weight = head.weight.detach().t()
    small = weight.device.type == "cpu" and weight.numel() <= BY_INPUT_NUMBERS
    return weight.contiguous() if small else weight


def _layer_of(layer: Any, layout: Layout, ranks: Collectives | None) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_dim: int = attention.head_dim
    qkv = joined([getattr(attention, name) for name in layout.qkv])
    heads: int = attention.o_proj.in_features // head_dim  # here, of several ranks
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
        torch.cuda.empty_cache()  # the parts just given up fit nothing that comes, and would stay
    return fused


def _norm_of(norm: Any) -> Norm:
    return Norm(norm.weight.detach(), norm.variance_epsilon)


def _head_norm_of(attention: Any, heads: int, kv_heads: int) -> Norm:
    """A few numbers a head, kept twice so that queries and keys are normed in one call."""
    q, k = attention.q_norm, attention.k_norm
    weight = torch.cat([q.weight.expand(heads, -1), k.weight.expand(kv_heads, -1)]).detach()
    return Norm(weight, q.variance_epsilon)

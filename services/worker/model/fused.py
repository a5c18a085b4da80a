"""A fused forward for the decoder layout that Llama, Qwen2, Qwen3, Mistral and Phi-3 share.

Each layer has one GEMM for queries, keys and values, and one for gate and up. The GEMMs add the
residual. Norm, rotation and gate are one call each (layer_ops.py). After the last attention only
the rows that need logits are computed. The weights are those of the module. Where several
are joined, the module's parameters become views of the joined weight: only a small output head and
head norms are stored twice, and transformers' forward still runs. No call waits for the device, and
no shape depends on data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from services.worker.kernels.interface import AttentionOptions, AttentionStep
from services.worker.kernels.low_rank import AdapterRows, LowRankMap, LowRankProducts, StepAdapters
from services.worker.kernels.reference.layer_ops import TorchLayerOps
from services.worker.kernels.weights import Weight
from services.worker.model.fused_layouts import Layout
from services.worker.model.rank_group import RankGroup

# Limit of a table of rotations, which that of 131,072 positions of 128 numbers in bfloat16 reaches.
# For a larger table each step computes its rotations, once for all layers.
ROTARY_TABLE_BYTES = 64 * 2**20
# Numbers of a weight up to which a CPU reads it fastest in input-major layout: it fits in a core's
# cache, and kernels/cpu/matmul.py computes its products if possible. Measured with one thread in
# float32 and bfloat16: up to twice as fast for 1 to 64 rows.
BY_INPUT_NUMBERS = 2**19


@dataclass(frozen=True, slots=True)
class Added:
    """What adapters add to the linear maps of a forward, for the rows that have one."""

    products: LowRankProducts
    rows: AdapterRows


@dataclass(frozen=True, slots=True)
class Linear:
    """x · weight + bias, for x [rows, in]. `weight` [in, out] is a view of the module's weight,
    except for a small output head, until it is packed or quantized. With `ranks`, each rank has
    some of the inputs, and the results of all ranks are summed."""

    weight: Weight
    bias: Tensor | None
    ranks: RankGroup | None = None
    change: LowRankMap | None = None  # of adapters, if the worker may hold some

    def converted(self, convert: Callable[[Tensor], Weight]) -> "Linear":
        assert isinstance(self.weight, Tensor), "converted before"
        return replace(self, weight=convert(self.weight))

    def project(self, ops: TorchLayerOps, x: Tensor, added: Added | None = None) -> Tensor:
        out = ops.product(x, self.weight, self.bias)
        if added is not None:
            self._add_adapters(added, out, x)
        return out

    def add_to(
        self, ops: TorchLayerOps, total: Tensor, x: Tensor, added: Added | None = None
    ) -> None:
        """total += product(x), summed by the GEMM itself."""
        if self.ranks is not None:
            total.add_(self.ranks.sum(self.project(ops, x, added)))
            return
        ops.add_product(total, x, self.weight)
        if self.bias is not None:
            total.add_(self.bias)
        if added is not None:
            self._add_adapters(added, total, x)

    def _add_adapters(self, added: Added, out: Tensor, x: Tensor) -> None:
        assert self.change is not None, "a map of the layers has no room for adapters"
        added.products.add(self.change, out, x, added.rows)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm. Its weight is [numbers]; that of queries and keys is [heads + kv_heads,
    head_dim]."""

    weight: Tensor
    eps: float


class Rotary:
    """cos and sin of every position, with the module's frequencies and scaling.

    The first half of each sin is negated: rotate_half(x) · sin then equals x with swapped halves
    times sin.
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
            rotations = self._rotations(positions)
        else:
            rotations = self._table.index_select(0, positions)
        cos, sin = rotations.unsqueeze(1).chunk(2, -1)
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
        self,
        ops: TorchLayerOps,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        added: Added | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [Σ tokens, heads, head_dim], as strided slices of one product."""
        normed = ops.norm(hidden, self.attention_norm.weight, self.attention_norm.eps)
        qkv = self.qkv.project(ops, normed, added).view(len(hidden), -1, self.head_dim)
        weight, eps = (self.head_norm.weight, self.head_norm.eps) if self.head_norm else (None, 0.0)
        rotated = ops.rotate(qkv, self.heads + self.kv_heads, weight, eps, cos, sin)
        return rotated[:, : self.heads], rotated[:, self.heads :], qkv[:, -self.kv_heads :]

    def finish(
        self, ops: TorchLayerOps, hidden: Tensor, attended: Tensor, added: Added | None = None
    ) -> None:
        """Adds the output projection of attention [Σ tokens, heads · head_dim] and the MLP to
        `hidden`."""
        self.output.add_to(ops, hidden, attended, added)
        normed = ops.norm(hidden, self.mlp_norm.weight, self.mlp_norm.eps)
        gated = ops.silu_and_mul(self.gate_up.project(ops, normed, added))
        self.down.add_to(ops, hidden, gated, added)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def converted(self, convert: Callable[[Tensor], Weight]) -> "Layer":
        qkv, output, gate_up, down = (linear.converted(convert) for linear in self.linears)
        return replace(self, qkv=qkv, output=output, gate_up=gate_up, down=down)


class FusedForward:
    """`module`'s forward with few calls. Rotations are precomputed for `positions`. `ranks` is set
    if the module is one rank's part."""

    def __init__(
        self,
        module: PreTrainedModel,
        layout: Layout,
        positions: int,
        ops: TorchLayerOps,
        ranks: RankGroup | None = None,
    ):
        self._ops = ops
        self._module = module
        self._layout = layout
        self._low_rank: LowRankProducts | None = None  # set if the worker may hold adapters
        decoder = module.model
        # With ranks a lookup needs communication, which the hooks of the module do.
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
        self,
        tokens: Tensor,
        positions: Tensor,
        step: AttentionStep,
        rows: Tensor | None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Logits [rows, vocabulary] of the packed batch; of all its tokens if `rows` is None."""
        hidden, cos, sin = self.embed(tokens, positions)
        ops, last = self._ops, self.layers[-1]
        added = self._added(adapters.tokens if adapters else None)
        for layer in self.layers:
            q, k, v = layer.project(ops, hidden, cos, sin, added)
            attended = step.attend(layer.index, q, k, v, layer.options).flatten(1)
            if layer is last and rows is not None:
                hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
                added = self._added(adapters.logits if adapters else None)
            layer.finish(ops, hidden, attended, added)
        return self.logits(ops, hidden)

    def _added(self, rows: AdapterRows | None) -> Added | None:
        if rows is None:
            return None
        assert self._low_rank is not None, "a row has an adapter, and the forward holds none"
        return Added(self._low_rank, rows)

    def hold_adapters(
        self, make: Callable[[int, Sequence[int]], LowRankMap], products: LowRankProducts
    ) -> Mapping[str, tuple[LowRankMap, int]]:
        """Gives each linear map of the layers room for adapters: `make` takes its inputs and the
        outputs of its parts. Returns the map and part of each of the module's linear maps, by path.
        """
        self._low_rank, found = products, {}
        for i, (layer, of_module) in enumerate(
            zip(self.layers, self._module.model.layers, strict=False)
        ):
            linears, names = layer.linears, self._layout.linear_names
            changed = []
            for linear, paths in zip(linears, names, strict=True):
                joined = [of_module.get_submodule(path) for path in paths]
                change = make(joined[0].in_features, [part.out_features for part in joined])
                changed.append(replace(linear, change=change))
                for part, path in enumerate(paths):
                    found[f"model.layers.{i}.{path}"] = change, part
            qkv, output, gate_up, down = changed
            self.layers[i] = replace(layer, qkv=qkv, output=output, gate_up=gate_up, down=down)
        return found

    @property
    def eager(self) -> "FusedForward":
        """The forward that is not compiled."""
        return self

    @property
    def packs(self) -> bool:
        """Whether `pack_weights` changes anything."""
        linears = [self._head, *(linear for layer in self.layers for linear in layer.linears)]
        weights = [linear.weight for linear in linears]
        return any(isinstance(each, Tensor) and self._ops.packs(each) for each in weights)

    def lacks_for_int8(self) -> str:
        """What `quantize_weights` needs and does not have; empty if nothing is missing."""
        return self._ops.lacks_for_int8(self._module.device)

    def pack_weights(self) -> None:
        """Changes the weights to the layout that products are fastest with, one layer after the
        other. The module loses its own, so that only this forward runs afterwards. A head that is
        also the embedding is copied."""
        self._convert(self._ops.pack)

    def quantize_weights(self) -> None:
        """The same, with the layers' weights in INT8. Embedding and head keep their dtype."""
        self._convert(self._ops.quantize)

    def _convert(self, convert: Callable[[Tensor], Weight]) -> None:
        for i, layer in enumerate(self.layers):
            self.layers[i] = layer.converted(convert)
            _release_weights(self._module.model.layers[i])
        self._head = self._head.converted(self._ops.pack)
        _release_weights(self._module.lm_head)

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The initial residual stream, and the rotations cos and sin."""
        return self._embed(tokens), *self._rotary.at(positions)

    def logits(self, ops: TorchLayerOps, hidden: Tensor) -> Tensor:
        """Logits of rows that have passed all layers."""
        logits = self._head.project(ops, ops.norm(hidden, self._norm.weight, self._norm.eps))
        if self._ranks is None or logits.shape[-1] == self._vocabulary:
            return logits
        return self._ranks.all_gather(logits)


def join(linears: Sequence[nn.Linear]) -> Linear:
    """Joins linear maps with the same input into one. Their parameters become views of the joined
    ones. Peak memory is one additional map of this size."""
    biased = linears[0].bias is not None
    bias = _join_parameters(linears, "bias") if biased else None
    return Linear(_join_parameters(linears, "weight").t(), bias)


def _join_parameters(linears: Sequence[nn.Linear], name: str) -> Tensor:
    """The joined parameter: [out, in], or [out] for a bias."""
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


def _release_weights(module: nn.Module) -> None:
    """Frees the weights of the module's linear maps; their shapes and dtypes stay."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(part.weight.to("meta"), requires_grad=False)


def _head_weight(head: nn.Linear) -> Tensor:
    """The output head [in, out]. A small one is copied to the input-major layout, because the
    embedding may share it, which is read by rows."""
    weight = head.weight.detach().t()
    small = weight.device.type == "cpu" and weight.numel() <= BY_INPUT_NUMBERS
    return weight.contiguous() if small else weight


def _layer_of(layer: Any, layout: Layout, ranks: RankGroup | None) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_dim: int = attention.head_dim
    qkv = join([getattr(attention, name) for name in layout.qkv])
    heads: int = attention.o_proj.in_features // head_dim  # of this rank
    rows = sum(len(getattr(attention, name).weight) for name in layout.qkv)
    kv_heads = (rows // head_dim - heads) // 2
    fused = Layer(
        index=attention.layer_idx,
        options=AttentionOptions(attention.scaling, layout.window(attention)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        attention_norm=_norm_of(layer.input_layernorm),
        qkv=qkv,
        head_norm=_head_norm_of(attention, heads, kv_heads) if layout.head_norms else None,
        output=replace(join([attention.o_proj]), ranks=ranks),
        mlp_norm=_norm_of(layer.post_attention_layernorm),
        gate_up=join([getattr(mlp, name) for name in layout.gate_up]),
        down=replace(join([mlp.down_proj]), ranks=ranks),
    )
    if attention.o_proj.weight.device.type == "cuda":
        torch.cuda.empty_cache()  # no later allocation fits the freed parts
    return fused


def _norm_of(norm: Any) -> Norm:
    return Norm(norm.weight.detach(), norm.variance_epsilon)


def _head_norm_of(attention: Any, heads: int, kv_heads: int) -> Norm:
    """The norms of queries and keys, copied, so that one call normalises both."""
    q, k = attention.q_norm, attention.k_norm
    weight = torch.cat([q.weight.expand(heads, -1), k.weight.expand(kv_heads, -1)]).detach()
    return Norm(weight, q.variance_epsilon)

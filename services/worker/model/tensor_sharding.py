"""TensorSharder: keeps one rank's shard of a model, by transformers' tensor-parallel plan.

`tp_plan` names a style for each linear map. "colwise" gives a rank some of the outputs; "rowwise"
gives it some of the inputs, and the results of all ranks are summed. transformers' classes for
these styles need `accelerate` to load a model and wrap every weight in a DTensor. This module uses
plain slices, and hooks where ranks exchange tensors; modules run unchanged. Heads are outputs of q,
k and v, so that attention and its KV are sharded by head without further code.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from services.worker.model.rank_group import RankGroup

LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
# Linear maps with shards that must be whole heads.
HEADS = ("q_proj", "k_proj", "v_proj", "query_key_value")


class TensorSharder:
    """Shards a model once; tied weights stay tied. `barrier` is one of all ranks, because a rank
    may read its files for longer than the timeout of a collective."""

    def __init__(self, group: RankGroup, barrier: Callable[[], object] = lambda: None):
        self.ranks = group
        self._barrier = barrier
        # Inputs and outputs of the linear maps before they were sharded, by path.
        self.wholes: dict[str, tuple[int, int]] = {}
        self._parts: dict[tuple[int, int], nn.Parameter] = {}
        # Referenced until the end, so that ids stay unique.
        self._whole_weights: list[nn.Parameter] = []

    def shard(self, module: PreTrainedModel) -> None:
        """Shards `module` in place. Shards are copies, so that the whole weights are freed. Raises
        ValueError, one sentence, if the model has no plan or an unsupported one."""
        plan = sharding_plan(module)
        require_even_heads(module.config.get_text_config(), plan, self.ranks.size)
        modules = dict(module.named_modules())
        for name, part in modules.items():
            if (style := plan.get(_layer_pattern(name))) is not None:
                if isinstance(part, nn.Linear):
                    self.wholes[name] = part.in_features, part.out_features
                STYLES[style](self, part)
        self._parts.clear()
        self._whole_weights.clear()
        self._barrier()

    def colwise(self, linear: nn.Linear) -> None:
        """Keeps outputs [first, end)."""
        first, end = self.ranks.bounds(linear.out_features)
        self._take(linear, "weight", 0)
        self._take(linear, "bias", 0)
        linear.out_features = end - first

    def rowwise(self, linear: nn.Linear) -> None:
        """Keeps inputs [first, end); sums results over ranks, with the bias on rank 0."""
        first, end = self.ranks.bounds(linear.in_features)
        self._take(linear, "weight", 1)
        if self.ranks.rank:
            linear.register_parameter("bias", None)
        linear.in_features = end - first
        linear.register_forward_hook(self._summed)

    def colwise_gather(self, linear: nn.Linear) -> None:
        """Computes a shard of the outputs and gathers all; replicated if they do not divide."""
        if linear.out_features % self.ranks.size:
            return
        self.colwise(linear)
        linear.register_forward_hook(self._gathered)

    def rowwise_split(self, linear: nn.Linear) -> None:
        """Like rowwise, for an input that every rank has in full."""
        first, end = self.ranks.bounds(linear.in_features)
        linear.register_forward_pre_hook(lambda _, inputs: (inputs[0][..., first:end],))
        self.rowwise(linear)

    def embedding(self, table: nn.Embedding) -> None:
        """Keeps rows [first, end) of the vocabulary and sums over ranks. Replicated, like its head,
        if the vocabulary does not divide."""
        if table.num_embeddings % self.ranks.size:
            return
        first, end = self.ranks.bounds(table.num_embeddings)
        self._take(table, "weight", 0)
        table.num_embeddings, table.padding_idx = end - first, None
        lookup = _Lookup(self.ranks, first, end - first)
        table.register_forward_pre_hook(lookup.before)
        table.register_forward_hook(lookup.after)

    def whole(self, part: nn.Module) -> None:
        """Replicates the module."""

    def _summed(self, _: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return self.ranks.sum(output)

    def _gathered(self, _: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return self.ranks.all_gather(output)

    def _take(self, part: nn.Module, name: str, dim: int) -> None:
        whole: nn.Parameter | None = getattr(part, name)
        if whole is None:
            return
        key = (id(whole), dim)
        if key not in self._parts:
            self._whole_weights.append(whole)
            first, end = self.ranks.bounds(whole.shape[dim])
            taken = whole.detach().narrow(dim, first, end - first)
            part_of_it = taken.clone(memory_format=torch.contiguous_format)
            self._parts[key] = nn.Parameter(part_of_it, requires_grad=False)
        setattr(part, name, self._parts[key])


class _Lookup:
    """Lookup in one rank's rows of an embedding: other ids give zero, and ranks are summed."""

    def __init__(self, group: RankGroup, first: int, rows: int):
        self.ranks = group
        self._first = first
        self._rows = rows
        self._others = torch.empty(0)

    def before(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        here = inputs[0] - self._first
        self._others = (here < 0) | (here >= self._rows)
        return (here.masked_fill_(self._others, 0),)

    def after(self, _: nn.Module, inputs: object, found: Tensor) -> Tensor:
        return self.ranks.sum(found.masked_fill_(self._others.unsqueeze(-1), 0))


Style = Callable[[TensorSharder, Any], None]
STYLES: Mapping[str, Style] = {
    "colwise": TensorSharder.colwise,
    "rowwise": TensorSharder.rowwise,
    "rowwise_rep": TensorSharder.rowwise,
    "colwise_gather_output": TensorSharder.colwise_gather,
    "colwise_rep": TensorSharder.colwise_gather,
    "rowwise_split_input": TensorSharder.rowwise_split,
    "embedding_rowwise": TensorSharder.embedding,
    "replicated_with_grad_allreduce": TensorSharder.whole,
    "replicate": TensorSharder.whole,
}
LINEAR = frozenset(
    ("colwise", "rowwise", "rowwise_rep", "colwise_gather_output", "colwise_rep",
     "rowwise_split_input")
)  # fmt: skip


NO_PLAN = "transformers has no tp_plan for {}: set tensor_parallel to 1"


def sharding_plan(module: PreTrainedModel) -> Mapping[str, str]:
    """Returns the style by module name, layer numbers as `*`. Raises ValueError, one sentence."""
    plan: Mapping[str, str] = module.tp_plan or {}
    kind = type(module).__name__
    used: dict[str, str] = {}
    unsupported: set[str] = set()
    for name, part in module.named_modules():
        if (style := plan.get(_layer_pattern(name))) is None:
            continue
        used[_layer_pattern(name)] = style
        if style not in STYLES or (style in LINEAR and type(part) is not nn.Linear):
            unsupported.add(style)
    unsupported |= {
        plan[n] for name, _ in module.named_parameters() if (n := _layer_pattern(name)) in plan
    }
    if not LINEAR & set(used.values()):
        raise ValueError(NO_PLAN.format(kind))
    if unsupported:
        raise ValueError(
            f"the tp_plan of {kind} uses {', '.join(sorted(unsupported))}, which is not supported: "
            "set tensor_parallel to 1"
        )
    return used


def require_even_heads(config: PreTrainedConfig, plan: Mapping[str, str], size: int) -> None:
    """Raises ValueError, one sentence, if the heads do not divide evenly over the ranks."""
    by_rank = any(
        style == "colwise" and name.rpartition(".")[2] in HEADS for name, style in plan.items()
    )
    if not by_rank:
        return
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or kv_heads % size:
        raise ValueError(
            f"its {heads} attention heads and {kv_heads} key-value heads cannot be split evenly "
            f"over {size} ranks: set tensor_parallel to a number that divides both"
        )


def _layer_pattern(name: str) -> str:
    """Returns a module's name with layer numbers as `*`."""
    return LAYER_NUMBER.sub(".*", name)

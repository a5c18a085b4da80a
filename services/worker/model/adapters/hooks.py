"""Adapters of a model that runs through transformers' forward: a hook adds their products."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from services.worker.kernels.low_rank import AdapterRows, LowRankMap, LowRankProducts


class AdapterHooks:
    """Adds to the results of linear maps what the adapters of `rows` change; nothing while it is
    None."""

    def __init__(self) -> None:
        self.rows: AdapterRows | None = None

    def attach(
        self,
        linear: nn.Linear,
        make: Callable[[int, Sequence[int]], LowRankMap],
        products: LowRankProducts,
    ) -> LowRankMap:
        """Gives a linear map room for adapters: `make` takes its inputs and outputs."""
        change = make(linear.in_features, [linear.out_features])

        def add(_: nn.Module, inputs: Any, out: Tensor) -> None:
            if self.rows is not None:
                x: Tensor = inputs[0]
                products.add(change, out.flatten(0, -2), x.flatten(0, -2), self.rows)

        linear.register_forward_hook(add, prepend=True)  # before results of ranks are joined
        return change


def find_linears(
    module: PreTrainedModel, run: Callable[[], object], tokens: int
) -> Mapping[str, nn.Linear]:
    """The linear maps, by path, that `run` applies once, to all `tokens` of a packed row. Others,
    such as experts that see some tokens, cannot have adapters; nor can the output head."""
    calls: dict[str, list[int]] = {}
    handles = []
    head = module.get_output_embeddings()
    linears = {
        name: part
        for name, part in module.named_modules()
        if type(part) is nn.Linear and part is not head
    }
    for name, part in linears.items():

        def count(_: nn.Module, inputs: Any, name: str = name) -> None:
            x: Tensor = inputs[0]
            calls.setdefault(name, []).append(x.numel() // x.shape[-1])

        handles.append(part.register_forward_pre_hook(count))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: linears[name] for name, seen in calls.items() if seen == [tokens]}

"""Evaluates an ensemble's nets as one, so that four nets cost little more than one."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, gelu

from services.predictor.models.nets.net import WORD_GAIN, Inputs, Net


class Fused:
    """Mean score of trained nets with the same preparation, equal within rounding.

    First layers are concatenated, so that inputs are read once; later layers are stacked and
    multiplied in one call.
    """

    def __init__(self, nets: Sequence[Net], dense: int):
        self._count = len(nets)
        first, second, last = ([_linear(net, at) for net in nets] for at in (1, 4, 7))
        self._dense = torch.cat([layer.weight[:, :dense] for layer in first]).t().contiguous()
        self._first_bias = torch.cat([layer.bias for layer in first])
        self._rest = torch.stack([layer.weight[:, dense:].t() for layer in first])
        self._second = torch.stack([layer.weight.t() for layer in second])
        self._second_bias = torch.stack([layer.bias for layer in second])[:, None]
        self._last = torch.stack([layer.weight.t() for layer in last])
        self._last_bias = torch.stack([layer.bias for layer in last])[:, None]
        self._middle = torch.stack([net.middle for net in nets])[:, None]
        self._deviation = torch.stack([net.deviation for net in nets])[:, None]
        self._view = nets[0].view
        self._words = _side_by_side([net.words for net in nets], [net.wide for net in nets])
        self._names = _side_by_side([net.names for net in nets], [net.levels for net in nets])
        self._outputs = last[0].out_features

    @torch.inference_mode()
    def scores(self, inputs: Inputs) -> Tensor:
        """[n, outputs]."""
        hidden = torch.addmm(self._first_bias, inputs.dense, self._dense)
        hidden = hidden.view(len(hidden), self._count, -1).transpose(0, 1)
        beside, straight = self._bags(inputs)
        if beside:
            hidden = hidden + torch.bmm(torch.cat(beside, dim=2), self._rest)
        hidden = gelu(torch.baddbmm(self._second_bias, gelu(hidden), self._second))
        scores_by_net = torch.baddbmm(self._last_bias, hidden, self._last)
        for path in straight:
            scores_by_net = scores_by_net + path
        return ((scores_by_net - self._middle) / self._deviation).mean(dim=0)

    def _bags(self, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
        """Word and name vectors and their linear paths: [nets, n, …] each."""
        beside, straight = [], []
        if self._view.words:
            bag = embedding_bag(
                inputs.words, self._words, inputs.starts, mode="sum",
                per_sample_weights=inputs.weights,
            )  # fmt: skip
            vectors, paths = self._parted(bag)
            beside.append(WORD_GAIN * vectors)
            straight.append(paths)
        if self._view.names:
            vectors, paths = self._parted(self._names[inputs.names].sum(dim=1))
            beside.append(vectors)
            straight.append(paths)
        return beside, straight

    def _parted(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        each = bag.view(len(bag), self._count, -1).transpose(0, 1)
        return each[..., : -self._outputs], each[..., -self._outputs :]


def _linear(net: Net, at: int) -> nn.Linear:
    layer = net.deep[at]
    assert isinstance(layer, nn.Linear)
    return layer


def _side_by_side(deep: Sequence[nn.EmbeddingBag], wide: Sequence[nn.EmbeddingBag]) -> Tensor:
    """[places, nets · (dim + outputs)]; row 0, the unknown name, is zero in all nets."""
    pairs = zip(deep, wide, strict=True)
    return torch.cat([torch.cat([d.weight, w.weight], dim=1) for d, w in pairs], dim=1).detach()

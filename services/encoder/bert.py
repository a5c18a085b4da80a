"""BERT in INT8 on packed rows: no padding, and each text attends only to itself.

Weights are quantized symmetrically with one scale per output channel, activations per row at run
time. Activations have 8 bits and weights 7, so that products fit the 16-bit sums of processors
without VNNI (255 · 64 · 2 < 2^15) without saturation; other splits lose more accuracy.
"""

import warnings
from collections import deque
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import BertModel
from transformers.models.bert.modeling_bert import BertLayer

_ROW_LEVELS = 127.0
_ROW_ZERO = 128
_WEIGHT_LEVELS = 64
_SMALLEST = 1e-30  # scale of an all-zero row or channel, which stays zero


class Int8Linear:
    """x [rows, in] → [rows, out] float32. The result of a row does not depend on other rows."""

    def __init__(self, *parts: nn.Linear):
        weight = torch.cat([part.weight.detach().float() for part in parts])
        self._bias = torch.cat([part.bias.detach().float() for part in parts])
        self._packed = torch.ops.quantized.linear_prepack(_quantized(weight), None)

    def __call__(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).clamp_min_(_SMALLEST)
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / scale, 1 / _ROW_LEVELS, _ROW_ZERO, self._packed
        )
        return torch.addcmul(self._bias, y, scale)


def _quantized(weight: Tensor) -> Tensor:
    scales = (weight.abs().amax(1).double() / _WEIGHT_LEVELS).clamp_min(_SMALLEST)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():  # deprecated, but the successor is 1.7 times slower on 20 rows
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        return torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)


class _Layer:
    def __init__(self, layer: BertLayer, heads: int):
        attention, output = layer.attention, layer.output
        projections = attention.self
        self._heads = heads
        self._qkv = Int8Linear(projections.query, projections.key, projections.value)
        self._attended = Int8Linear(attention.output.dense)
        self._attended_norm = attention.output.LayerNorm
        self._up = Int8Linear(layer.intermediate.dense)
        self._activation = layer.intermediate.intermediate_act_fn
        self._down = Int8Linear(output.dense)
        self._norm = output.LayerNorm

    def __call__(self, x: Tensor, lengths: list[int]) -> Tensor:
        x = self._attended_norm(self._attended(self._attend(x, lengths)) + x)
        return cast(Tensor, self._norm(self._down(self._activation(self._up(x))) + x))

    def _attend(self, x: Tensor, lengths: list[int]) -> Tensor:
        """Attention within each text: [rows, dim] → [rows, dim]."""
        rows = x.shape[0]
        qkv = self._qkv(x).view(1, rows, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        texts = qkv.split_with_sizes(lengths, 3)
        seen = [scaled_dot_product_attention(q, k, v) for q, k, v in texts]
        return torch.cat(seen, 2)[0].transpose(0, 1).reshape(rows, -1)


class Int8Bert:
    """Approximates the hidden states of a `BertModel`'s last layers.

    Raises ValueError for a decoder, and RuntimeError or AttributeError when PyTorch has no INT8
    product for this processor.
    """

    def __init__(self, model: BertModel, layers: int):
        if model.config.is_decoder:
            raise ValueError("a decoder attends to other positions")
        embeddings = model.embeddings
        self._words = embeddings.word_embeddings.weight.detach()
        self._positions = (
            embeddings.position_embeddings.weight + embeddings.token_type_embeddings.weight[0]
        ).detach()
        self._norm = embeddings.LayerNorm
        heads = model.config.num_attention_heads
        self._layers = [_Layer(layer, heads) for layer in model.encoder.layer]
        self._kept_layers = layers

    def __call__(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Token ids per text → states [layers, tokens, dim] per text."""
        lengths = [len(ids) for ids in texts]
        ids = torch.tensor([token for text in texts for token in text])
        positions = torch.cat([self._positions[:length] for length in lengths])
        x = self._norm(embedding(ids, self._words) + positions)
        states = deque([x], self._kept_layers)
        for layer in self._layers:
            states.append(layer(states[-1], lengths))
        return list(torch.stack(list(states)).split_with_sizes(lengths, 1))

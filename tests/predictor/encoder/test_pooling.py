"""Pooling of encoder states, as configured by the encoder's folder."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from services.encoder.encoder import Encoder
from services.predictor.interface import LAYERS
from tests.predictor.encoder.small_encoders import (
    bert,
    distilbert,
    last_states,
    nearly,
    pooled_by,
    saved,
    then_dense,
    tokenizer,
    unit,
)


@pytest.mark.parametrize("make", [bert, distilbert])
def test_default_pooling_is_mean(tmp_path: Path, make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    encoder = Encoder.load(str(saved(tmp_path, model)))
    assert encoder.cap_tokens == 30  # the model has no more positions
    vectors = encoder.encode(["write a poem", "the sea", "list", ""])
    assert nearly(vectors[0, -1], last_states(model, "write a poem")[0].mean(0))
    assert nearly(vectors[1, -1], last_states(model, "the sea")[0].mean(0))
    assert all(map(unit, vectors[:3]))
    assert not vectors[3].any()
    assert encoder.encode(["poem " * 100]).shape == (1, LAYERS, 32)


def in_fp32(folder: Path, patch: pytest.MonkeyPatch) -> Encoder:
    patch.setattr("services.encoder.encoder.AGREEMENT", 2)  # below any cosine similarity
    encoder = Encoder.load(str(folder))
    assert encoder.precision == "fp32"
    return encoder


def test_pooling_gives_means_of_previous_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bert(layers=5)
    texts = ["write a poem", "the sea"]  # one pass; the second text is padded
    vectors = in_fp32(saved(tmp_path, model), monkeypatch).encode(texts)
    assert vectors.shape == (2, 3, 32)
    for row, cut in (
        (2, 5),
        (1, 4),
        (0, 3),
    ):  # a model truncated after a layer ends with its states
        model.encoder.layer = model.encoder.layer[:cut]
        for text, vector in zip(texts, vectors, strict=True):
            mean = last_states(model, text)[0].mean(0)
            np.testing.assert_allclose(vector[row], mean / mean.norm(), atol=1e-5)


def test_pooling_fills_missing_layers_with_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bert(layers=1)
    folder = saved(tmp_path, model)
    int8 = Encoder.load(str(folder)).encode(["write a poem"])[0]
    fp32 = in_fp32(folder, monkeypatch).encode(["write a poem"])[0]
    with torch.inference_mode():
        embedded = model.embeddings(torch.tensor([tokenizer().encode("write a poem").ids]))
    for none, first, last in (int8, fp32):
        assert not none.any()
        assert nearly(first, embedded[0].mean(0))
        assert nearly(last, last_states(model, "write a poem")[0].mean(0))


def test_modules_json_selects_first_token_pooling(tmp_path: Path) -> None:
    model = bert()
    pooled_by(saved(tmp_path, model), "cls_token")
    vector = Encoder.load(str(tmp_path)).encode(["write a poem"])[0]
    assert nearly(vector[-1], last_states(model, "write a poem")[0, 0])


def test_labse_pooling_uses_its_pooler(tmp_path: Path) -> None:
    model = bert()
    plain, listed = saved(tmp_path / "LaBSE", model), saved(tmp_path / "listed", model)
    pooled_by(listed, "cls_token")
    then_dense(listed, model.pooler.dense)

    with torch.inference_mode():
        expected = model.pooler(last_states(model, "write a poem"))[0]
    for folder in (plain, listed):
        assert nearly(Encoder.load(str(folder)).encode(["write a poem"])[0, -1], expected)


def test_dimension_changing_pooling_repeats_sentence(tmp_path: Path) -> None:
    model, layer = bert(), nn.Linear(32, 12)
    pooled_by(saved(tmp_path, model), "mean_tokens")
    then_dense(tmp_path, layer)
    encoder = Encoder.load(str(tmp_path))
    vectors = encoder.encode(["write a poem", ""])
    assert vectors.shape == (2, LAYERS, encoder.dim) == (2, 3, 12)
    with torch.inference_mode():
        expected = torch.tanh(layer(last_states(model, "write a poem")[0].mean(0)))
    assert unit(vectors[0])
    assert all(nearly(row, expected) for row in vectors[0])
    np.testing.assert_array_equal(vectors[0], np.stack([vectors[0, -1]] * LAYERS))
    assert not vectors[1].any()

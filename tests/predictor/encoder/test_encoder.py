"""The packaged sentence encoder: vectors, limits and unusual text."""

import threading

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from services.encoder.encoder import CAP_TOKENS, PASS_TOKENS, Encoder, Rows
from services.encoder.source import DEFAULT_NAME, find_folder
from services.predictor.interface import LAYERS
from tests.predictor.encoder.small_encoders import unit

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
    """[n, LAYERS, dim]; the last row as sentence-transformers computes it: the unit mean of the
    last states."""
    folder = find_folder(DEFAULT_NAME)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    model = AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        states = [
            model(torch.tensor([tokenizer.encode(text).ids]), output_hidden_states=True)
            for text in texts
        ]
    layers = [[layer[0].mean(0).numpy() for layer in reported.hidden_states] for reported in states]
    means = np.array(layers)[:, -LAYERS:]
    return np.asarray(means / np.linalg.norm(means, axis=2, keepdims=True))


def test_paraphrases_are_more_similar_than_other_requests(encoder: Encoder) -> None:
    poem, verses, total, add_up = encoder.encode(TEXTS)[:, -1]
    assert poem @ verses > 0.5 > poem @ total
    assert total @ add_up > 0.4 > verses @ add_up


def test_int8_encoder_matches_model_within_one_percent(encoder: Encoder) -> None:
    texts = [*TEXTS, "def f(x):\n    return x + 1  # what does this do?", "Wie spät ist es?"]
    ours = encoder.encode(texts)
    assert ours.dtype == np.float32
    assert ours.shape == (6, LAYERS, encoder.dim) == (6, 3, 384)
    assert (np.sum(ours * own_vectors(texts), axis=2) > 0.99).all()
    has_int8 = torch.backends.quantized.engine in ("x86", "fbgemm")
    assert encoder.precision == ("int8" if has_int8 else "fp32")


def test_encoder_vector_does_not_depend_on_batch(encoder: Encoder) -> None:
    texts = [f"{'word ' * (3 * i)} number {i}" for i in range(40)] + ["", TEXTS[0]]
    together = encoder.encode(texts)
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-4)
    assert encoder.encode([]).shape == (0, LAYERS, 384)


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_encoder_gives_finite_vector_for_any_text(encoder: Encoder, text: str) -> None:
    broken = encoder.broken
    vector, neighbour = encoder.encode([text, TEXTS[0]])
    assert unit(vector) or not vector.any()
    np.testing.assert_allclose(neighbour, encoder.encode([TEXTS[0]])[0], atol=1e-4)
    assert encoder.broken == broken


def test_encoder_gives_zeros_for_empty_text_without_forward_pass(encoder: Encoder) -> None:
    tokens = encoder.tokens
    assert not encoder.encode(["", " \n ", "\0"]).any()
    assert encoder.tokens == tokens


def test_encoder_caps_long_text(encoder: Encoder) -> None:
    tokens = encoder.tokens
    long = "tell me a story " * 70_000  # 1.1 MB
    vector = encoder.encode([long])[0]
    assert encoder.tokens - tokens == encoder.cap_tokens == CAP_TOKENS == 64
    np.testing.assert_array_equal(vector, encoder.encode([long[: encoder.head_chars]])[0])


def test_encoder_cap_is_configurable() -> None:
    encoder = Encoder.load(cap_tokens=16)
    same_head = ["one two three " * n for n in (10, 20)]
    first, second = encoder.encode(same_head)
    np.testing.assert_allclose(first, second, atol=1e-6)
    assert encoder.tokens == 32


def test_encoder_forward_pass_is_bounded(encoder: Encoder) -> None:
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


def test_encoder_restores_pytorch_threads() -> None:
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

"""A prompt's text to features: milliseconds by length, in batches, and from the cache.

    python -m benchmarks.encoder [--json FILE] [--quick]

Medians with their spread, one PyTorch thread. `agreement` is the cosine to the model's own fp32.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoModel

from benchmarks.harness.report import Figure, figure, options, show, write
from services.predictor.encoder.encoder import Encoder
from services.predictor.encoder.extract import Extractor
from services.predictor.encoder.packing import pack, unpack
from services.predictor.encoder.source import DEFAULT_NAME, find_folder
from services.predictor.encoder.words import columns
from services.predictor.interface import Prompt

SENTENCE = "Give me three tips for staying healthy and explain why each of them matters to you. "
BATCH = 32


def main() -> None:
    given = options("Milliseconds from a prompt's text to its features.")
    repeats = 5 if given.quick else 200
    encoder = Encoder.load()
    work = _work(encoder, Extractor(encoder))
    took = {name: _measure(do, repeats) for name, do in work.items()}
    show("A prompt's features", ("what", "ms"), list(took.items()))
    agreement = _agreement(encoder)
    print(f"{encoder.precision}, agreement {agreement:.4f}")
    figures = {name: each.values for name, each in took.items()}
    write(given.json, {"ms": figures, "precision": encoder.precision, "agreement": agreement})


def _work(encoder: Encoder, extractor: Extractor) -> dict[str, Callable[[], object]]:
    texts = {"8": SENTENCE[:30], "20": SENTENCE, "60": SENTENCE * 3, "cap": SENTENCE * 20}
    known = Prompt("You are a helpful assistant.", SENTENCE, 30, (100, 200))
    (features,) = extractor.extract([known])
    packed = pack(features)
    fresh = iter(range(10**9))
    return {
        **{f"encode, {n} tokens": _encode(encoder, [text]) for n, text in texts.items()},
        f"encode, {BATCH} of 20 tokens": _encode(encoder, [SENTENCE] * BATCH),
        "encode, 1 MB": _encode(encoder, ["x y " * 2**18]),
        "extract, new": lambda: extractor.extract([Prompt("", f"{next(fresh)} {SENTENCE}", 30)]),
        "extract, known": lambda: extractor.extract([known]),
        "words, 100": lambda: columns(SENTENCE * 6),
        "pack": lambda: pack(features),
        "unpack": lambda: unpack(packed),
    }


def _encode(encoder: Encoder, texts: list[str]) -> Callable[[], object]:
    return lambda: encoder.encode(texts)


def _measure(do: Callable[[], object], repeats: int) -> Figure:
    for _ in range(3):
        do()
    took: list[float] = []
    began_s = time.perf_counter()
    while len(took) < repeats and (len(took) < 5 or time.perf_counter() - began_s < 5):
        started_s = time.perf_counter()
        do()
        took.append((time.perf_counter() - started_s) * 1e3)
    return figure(took)


def _agreement(encoder: Encoder) -> float:
    """The least cosine over a few kinds of text."""
    texts = [SENTENCE, "def f(x): return x + 1", "Wie spät ist es?", "Summarise:\n" + SENTENCE * 3]
    model = AutoModel.from_pretrained(find_folder(DEFAULT_NAME)).eval()
    with torch.inference_mode():
        own = [
            model(input_ids=torch.tensor([encoder.token_ids(text)])).last_hidden_state[0].mean(0)
            for text in texts
        ]
    rows = np.stack([row.numpy() / float(row.norm()) for row in own])
    return float(np.sum(rows * encoder.encode(texts)[:, -1], axis=1).min())


if __name__ == "__main__":
    main()

"""Time from a prompt's text to its features, by length, in batches, and from the cache.

    python -m benchmarks.encoder [--json FILE] [--quick]

Medians with their spread, one PyTorch thread. `agreement` is the lowest cosine similarity to the
model's states in fp32.
"""

from collections.abc import Callable
from itertools import count

import numpy as np
import torch
from transformers import AutoModel

from benchmarks.harness.report import parser, show, write
from benchmarks.harness.timing import time_calls
from services.encoder.encoder import Encoder
from services.encoder.source import DEFAULT_NAME, find_folder
from services.predictor.encoder.extract import Extractor
from services.predictor.encoder.packing import pack, unpack
from services.predictor.encoder.words import columns
from services.predictor.interface import Prompt

SENTENCE = "Give me three tips for staying healthy and explain why each of them matters to you. "
BATCH = 32
LIMIT_S = 5.0  # per call


def main() -> None:
    options = parser(__doc__).parse_args()
    repeats = 5 if options.quick else 200
    encoder = Encoder.load()
    figures = {
        name: time_calls(call, repeats, warm_up=3, limit_s=LIMIT_S)
        for name, call in _calls(encoder, Extractor(encoder)).items()
    }
    show("A prompt's features", ("call", "ms"), list(figures.items()))
    agreement = _agreement(encoder)
    print(f"{encoder.precision}, agreement {agreement:.4f}")
    times_ms = {name: each.values for name, each in figures.items()}
    write(options.json, {"ms": times_ms, "precision": encoder.precision, "agreement": agreement})


def _calls(encoder: Encoder, extractor: Extractor) -> dict[str, Callable[[int], object]]:
    texts = {"8": SENTENCE[:30], "20": SENTENCE, "60": SENTENCE * 3, "cap": SENTENCE * 20}
    known = Prompt("You are a helpful assistant.", SENTENCE, 30, (100, 200))
    (features,) = extractor.extract([known])
    packed = pack(features)
    unread = count()
    return {
        **{f"encode, {n} tokens": _encode(encoder, [text]) for n, text in texts.items()},
        f"encode, {BATCH} of 20 tokens": _encode(encoder, [SENTENCE] * BATCH),
        "encode, 1 MB": _encode(encoder, ["x y " * 2**18]),
        "extract, new": lambda _: extractor.extract([Prompt("", f"{next(unread)} {SENTENCE}", 30)]),
        "extract, known": lambda _: extractor.extract([known]),
        "words, 100": lambda _: columns(SENTENCE * 6),
        "pack": lambda _: pack(features),
        "unpack": lambda _: unpack(packed),
    }


def _encode(encoder: Encoder, texts: list[str]) -> Callable[[int], object]:
    return lambda _: encoder.encode(texts)


def _agreement(encoder: Encoder) -> float:
    """Returns the lowest cosine similarity over a few kinds of text."""
    texts = [SENTENCE, "def f(x): return x + 1", "Wie spät ist es?", "Summarise:\n" + SENTENCE * 3]
    model = AutoModel.from_pretrained(find_folder(DEFAULT_NAME)).eval()
    with torch.inference_mode():
        reference = [
            model(input_ids=torch.tensor([encoder.token_ids(text)])).last_hidden_state[0].mean(0)
            for text in texts
        ]
    rows = np.stack([row.numpy() / float(row.norm()) for row in reference])
    return float(np.sum(rows * encoder.encode(texts)[:, -1], axis=1).min())


if __name__ == "__main__":
    main()

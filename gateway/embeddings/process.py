"""`python -m gateway.embeddings.process NAME THREADS` computes embeddings and similarities.

Messages of both directions are `frames`. A question has a `kind` of KINDS; its payload is a JSON
list of texts. The answer's payload is what the HTTP answer contains: a JSON list. The first answer
says that the encoder is loaded, or why it is not. The end of stdin ends the process.
"""

import base64
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gateway.embeddings.frames import HEAD, encode_frame
from services.encoder.encoder import Encoder

MAX_TOKENS = 256  # of a text, as in training
NICE = 10  # generation comes first
PASS_TEXTS = 64  # texts of one call of the encoder

Matrix = NDArray[np.float32]
Header = Mapping[str, Any]


def embed(encoder: Encoder, texts: Sequence[str]) -> Matrix:
    """Unit vectors, [texts, dimension]."""
    parts = [
        encoder.encode(texts[begin : begin + PASS_TEXTS])[:, -1]
        for begin in range(0, len(texts), PASS_TEXTS)
    ]
    return np.concatenate(parts)


def _write_floats(vectors: Matrix) -> bytes:
    rows = (
        f'{{"object": "embedding", "index": {at}, "embedding": {json.dumps(row)}}}'
        for at, row in enumerate(vectors.tolist())
    )
    return f"[{', '.join(rows)}]".encode()


def _write_base64(vectors: Matrix) -> bytes:
    data = [
        {
            "object": "embedding",
            "index": at,
            "embedding": base64.b64encode(row.astype("<f4").tobytes()).decode(),
        }
        for at, row in enumerate(vectors)
    ]
    return json.dumps(data).encode()


def _write_scores(vectors: Matrix) -> bytes:
    """The cosine similarity of the first half of the texts with the second, in pairs."""
    half = len(vectors) // 2
    return json.dumps((vectors[:half] * vectors[half:]).sum(1).tolist()).encode()


def _write_ranks(vectors: Matrix) -> bytes:
    """The cosine similarity of the first text with each of the others."""
    return json.dumps((vectors[1:] @ vectors[0]).tolist()).encode()


KINDS: Mapping[str, Callable[[Matrix], bytes]] = {
    "float": _write_floats,
    "base64": _write_base64,
    "scores": _write_scores,
    "ranks": _write_ranks,
}


def answer(encoder: Encoder, header: Header, texts: Sequence[str]) -> tuple[Header, bytes]:
    """The header and payload. Unless the question has `cut`, a long text is a fault."""
    if not header["cut"]:
        long = next((at for at, text in enumerate(texts) if encoder.cuts(text)), None)
        if long is not None:
            return {"long": long, "most": encoder.cap_tokens}, b""
    distinct = list(dict.fromkeys(texts))
    places = {text: at for at, text in enumerate(distinct)}
    vectors = embed(encoder, distinct)[[places[text] for text in texts]]
    tokens = sum(len(encoder.token_ids(text)) for text in texts)
    return {"tokens": tokens, "dimensions": encoder.dim}, KINDS[header["kind"]](vectors)


def _read(source: BinaryIO) -> tuple[Header, bytes] | None:
    head = source.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    header_bytes, payload_bytes = HEAD.unpack(head)
    return json.loads(source.read(header_bytes)), source.read(payload_bytes)


def main() -> None:
    name, threads = sys.argv[1:]
    source, target = sys.stdin.buffer, sys.stdout.buffer

    def send(header: Header, payload: bytes = b"") -> None:
        target.write(encode_frame(header, payload))
        target.flush()

    os.nice(NICE)
    try:
        encoder = Encoder.load(name, MAX_TOKENS, int(threads), exact=True)
    except ValueError as error:
        send({"fault": str(error)})
        return
    send({"dimensions": encoder.dim})
    while (question := _read(source)) is not None:
        header, payload = question
        send(*answer(encoder, header, json.loads(payload)))


if __name__ == "__main__":
    main()

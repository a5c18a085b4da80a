"""Tokens for text that arrives in pieces: their decoding is the text."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Strip
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend
from tokenizers.normalizers import Replace as Replaced
from tokenizers.normalizers import Sequence as Normalizers

from foretoken.running.options import demo_model
from services.worker.backend.retokenizer import Retokenizer
from services.worker.folder import load_tokenizer

DEMO = load_tokenizer(demo_model())
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40)
PIECES = st.lists(st.one_of(TEXTS, st.sampled_from([" green", "green", " 12", "\n", " "])))


def sentencepiece() -> Tokenizer:
    """A tokenizer like Llama's: a space before the first word, and bytes for other characters."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁g", "re", "▁gre"]
    merges = [("▁", "g"), ("r", "e"), ("▁g", "re")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = Normalizers([Prepend("▁"), Replaced(" ", "▁")])
    tokenizer.decoder = Decoders([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return tokenizer


def tokens_of(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[int]:
    retokenizer = Retokenizer(tokenizer)
    ids = [token for piece in pieces for token in retokenizer.feed(piece)]
    return ids + retokenizer.flush()


@given(PIECES)
def test_decoding_is_the_text_with_a_byte_level_tokenizer(pieces: list[str]) -> None:
    ids = tokens_of(DEMO, pieces)
    assert DEMO.decode(ids, skip_special_tokens=False) == "".join(pieces)


@given(st.lists(st.text(" abcgre\né", min_size=1, max_size=8), max_size=8))
def test_decoding_is_the_text_with_a_sentencepiece_tokenizer(pieces: list[str]) -> None:
    tokenizer = sentencepiece()
    assert tokenizer.decode(tokens_of(tokenizer, pieces)) == "".join(pieces)


@pytest.mark.parametrize("tokenizer", [DEMO, sentencepiece()], ids=["bytes", "sentencepiece"])
def test_pieces_of_single_tokens_give_these_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("green green gregre", add_special_tokens=False).ids
    texts = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
    pieces = [texts[0], *(b[len(a) :] for a, b in itertools.pairwise(texts))]
    assert tokens_of(tokenizer, pieces) == ids

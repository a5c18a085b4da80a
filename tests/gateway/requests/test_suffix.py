"""Texts of which only the last tokens are kept: cut, they have the tokens of the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gateway.requests.suffix import CL100K, GPT_2, MAX_UNCUT_CHARS, O200K, PATTERNS, SuffixCutter
from services.runtime.errors import InvalidArgument
from tests.gateway.gateway_fakes import demo_text

CORPUS = [
    "The last words. Isn't it?\n\n  They're 1,234 of 5 items: it's a list;\tx=3.",
    "日本語、text! été na\u0308ive don't... 10:30 (ok)\r\nnext;; a  b   c",
]
TEXTS = st.text(
    st.sampled_from("aZs 1\t\r\n.,;:!?'’-/(é\u0301日。\u00a0\u0085\u200d²<|end|>"), max_size=120
)


def byte_level(pattern: str) -> Tokenizer:
    """A tokenizer with merges of its own, so that tokens are as long as pieces."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


TOKENIZERS = [byte_level(pattern) for pattern in sorted(PATTERNS)] + [demo_text().backend]


@given(TEXTS, st.sampled_from(TOKENIZERS), st.integers(1, 3))
def test_cut_text_has_the_last_tokens_of_the_whole(
    text: str, tokenizer: Tokenizer, keep_tokens: int
) -> None:
    text = text + CORPUS[0] + text + CORPUS[1] + text
    end = SuffixCutter(tokenizer).cut(text, keep_tokens)
    assert text.endswith(end)
    whole, cut = (tokenizer.encode(each).ids for each in (text, end))
    assert cut[-keep_tokens:] == whole[-keep_tokens:] and len(cut) >= keep_tokens


def test_a_long_text_is_cut_close_to_what_is_kept() -> None:
    cutter = SuffixCutter(demo_text().backend)
    assert len(cutter.cut("some words, " * 100_000, 10)) < 200
    assert cutter.cut("short", 10) == "short"


@pytest.mark.parametrize("pattern", [GPT_2, CL100K, O200K])
def test_a_long_text_without_a_place_to_cut_is_refused(pattern: str) -> None:
    cutter = SuffixCutter(byte_level(pattern))
    with pytest.raises(InvalidArgument, match="send a shorter prompt"):
        cutter.cut("a" * (MAX_UNCUT_CHARS + 10_000), 10)
    assert len(cutter.cut("a" * MAX_UNCUT_CHARS, 10)) == MAX_UNCUT_CHARS


def test_a_text_of_an_unknown_pre_tokenizer_stays_whole() -> None:
    tokenizer = byte_level(r"\w+|.")
    assert SuffixCutter(tokenizer).cut("a b " * 1000, 1) == "a b " * 1000
    with_blank = byte_level(GPT_2)
    with_blank.add_special_tokens(["<two words>"])
    assert SuffixCutter(with_blank).cut("a b " * 1000, 1) == "a b " * 1000

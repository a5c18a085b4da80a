"""The size limit of prompts: an upper bound for the bytes of a number of tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from gateway.requests.size import PromptSizeLimit, longest_token_bytes
from gateway.types.client_request import ClientRequest, Conversation, count_prompt_bytes
from gateway.types.generation import ContextLimit
from services.runtime.errors import InvalidArgument
from tests.gateway.gateway_fakes import demo_text

REACH = ContextLimit(10, "the cache")


def make_tokenizer(**parts: object) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "aaa": 1}, merges=[]))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


BY_BYTE = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    ("parts", "longest"),
    [
        ({"pre_tokenizer": BY_BYTE}, 3),
        ({"pre_tokenizer": BY_BYTE, "normalizer": normalizers.NFC()}, 9),
        ({"pre_tokenizer": BY_BYTE, "normalizer": normalizers.Lowercase()}, 0),
        ({"pre_tokenizer": BY_BYTE, "normalizer": normalizers.Strip()}, 0),
        ({"pre_tokenizer": BY_BYTE, "normalizer": normalizers.Replace(" ", "")}, 0),
        ({"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BY_BYTE])}, 0),
        (
            {"pre_tokenizer": pre_tokenizers.Sequence(
                [pre_tokenizers.Split("Bert(", "removed"), BY_BYTE])}, 0,
        ),
        (
            {"pre_tokenizer": pre_tokenizers.Sequence(
                [pre_tokenizers.Split("Bert(", "isolated"), BY_BYTE])}, 3,
        ),
        ({"pre_tokenizer": pre_tokenizers.Metaspace()}, 0),  # unknown text is joined or lost
        ({}, 0),
    ],
)  # fmt: skip
def test_longest_token_of_each_tokenizer_kind(parts: dict[str, object], longest: int) -> None:
    assert longest_token_bytes(make_tokenizer(**parts)) == longest


def test_longest_token_with_byte_fallback() -> None:
    model = models.BPE(vocab={"▁": 0, "<0x00>": 1}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    blanks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(blanks)
    assert longest_token_bytes(tokenizer) == 6


def test_longest_token_counts_added_tokens() -> None:
    tokenizer = make_tokenizer(pre_tokenizer=BY_BYTE)
    tokenizer.add_special_tokens(["<|end|>"])
    assert longest_token_bytes(tokenizer) == 7
    tokenizer.add_tokens([AddedToken("<y>", rstrip=True)])
    assert longest_token_bytes(tokenizer) == 0


@given(st.text(max_size=200))
def test_longest_token_bounds_every_text(text: str) -> None:
    longest = longest_token_bytes(demo_text().backend)
    assert longest * len(demo_text().encode(text)) >= len(text.encode())


def say(content: str) -> Conversation:
    return Conversation([{"role": "user", "content": content}])


def test_size_limit_names_the_field_that_is_too_long() -> None:
    limit = PromptSizeLimit(demo_text().backend)
    most = limit.longest_token_bytes * REACH.tokens
    for prompt, field in (
        ("a" * most, None),
        ("a" * (most + 1), "prompt"),
        ("é" * (most // 2 + 1), "prompt"),
        (say("a" * (most + 1)), "messages"),
        (say(" " * (most + 1)), None),  # templates strip blanks
        ([1] * 10, None),
        ([1] * 11, "prompt"),
    ):
        request, size_bytes = ClientRequest(prompt), count_prompt_bytes(prompt)
        if field is None:
            limit.check(request, size_bytes, REACH)
            continue
        with pytest.raises(InvalidArgument, match="maximum context length is 10 tokens") as caught:
            limit.check(request, size_bytes, REACH)
        assert caught.value.field == field

"""What is too long by its bytes: a bound that no text of that many tokens goes over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from gateway.requests.parser import Reach
from gateway.requests.size import Sizes, longest_token_bytes, text_bytes
from protos.generated import common_pb2, gateway_pb2
from services.runtime.errors import InvalidArgument
from tests.gateway.gateway_fakes import demo_text

REACH = Reach(10, "the cache")


def made(**parts: object) -> Tokenizer:
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
        ({"pre_tokenizer": pre_tokenizers.Metaspace()}, 0),  # what is unknown is joined or lost
        ({}, 0),
    ],
)  # fmt: skip
def test_the_longest_token_by_hand(parts: dict[str, object], longest: int) -> None:
    assert longest_token_bytes(made(**parts)) == longest


def test_a_model_that_spells_the_unknown_byte_by_byte() -> None:
    model = models.BPE(vocab={"▁": 0, "<0x00>": 1}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    blanks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(blanks)
    assert longest_token_bytes(tokenizer) == 6


def test_added_tokens_count_and_one_that_takes_blanks_along_has_no_bound() -> None:
    tokenizer = made(pre_tokenizer=BY_BYTE)
    tokenizer.add_special_tokens(["<|end|>"])
    assert longest_token_bytes(tokenizer) == 7
    tokenizer.add_tokens([AddedToken("<y>", rstrip=True)])
    assert longest_token_bytes(tokenizer) == 0


@given(st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_its_bytes_say(text: str) -> None:
    longest = longest_token_bytes(demo_text().backend)
    assert longest * len(demo_text().encode(text)) >= len(text.encode())


def asked(kind: str, **fields: object) -> gateway_pb2.GenerateRequest:
    if kind == "chat":
        turns = [gateway_pb2.ChatMessage(role="user", content=str(fields["content"]))]
        return gateway_pb2.GenerateRequest(chat=gateway_pb2.Chat(messages=turns))
    return gateway_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]


def test_what_is_refused_and_by_which_field() -> None:
    sizes = Sizes(demo_text().backend)
    most = sizes.longest_token_bytes * REACH.tokens
    ids = common_pb2.TokenIds(ids=[1] * 11)
    for request, field in (
        (asked("prompt", prompt="a" * most), None),
        (asked("prompt", prompt="a" * (most + 1)), "prompt"),
        (asked("prompt", prompt="é" * (most // 2 + 1)), "prompt"),
        (asked("chat", content="a" * (most + 1)), "messages"),
        (asked("chat", content=" " * (most + 1)), None),  # templates cut it off
        (asked("tokens", prompt_tokens=common_pb2.TokenIds(ids=[1] * 10)), None),
        (asked("tokens", prompt_tokens=ids), "prompt"),
    ):
        if field is None:
            sizes.check(request, text_bytes(request), REACH)
            continue
        with pytest.raises(InvalidArgument, match="maximum context length is 10 tokens") as caught:
            sizes.check(request, text_bytes(request), REACH)
        assert caught.value.field == field

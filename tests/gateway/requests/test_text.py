"""Incremental decoding and stop strings equal their results on the complete text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models

from gateway.requests.byte_tokens import BYTE_OF, ByteTokens, is_byte_level
from gateway.requests.incremental import ByteDetokenizer, Detokenizer, StopMatcher
from gateway.requests.prompts import tokenize_prompt
from gateway.requests.text import TemplateError, Text
from gateway.types.client_request import ClientRequest
from gateway.types.generation import Sampling
from models.tokenizer import make_tokenizer
from services.runtime.config import ConfigError
from services.runtime.errors import InvalidArgument
from tests.gateway.gateway_fakes import demo_folder, demo_text, tokens_of

VOCABULARY = demo_text().vocabulary_tokens
token_ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=60)


def cut(items: Sequence[int], lengths: Sequence[int]) -> list[Sequence[int]]:
    """`items` in chunks of these lengths, repeated."""
    chunks, at, turn = [], 0, 0
    while at < len(items):
        length = lengths[turn % len(lengths)]
        chunks.append(items[at : at + length])
        at, turn = at + length, turn + 1
    return chunks


@given(token_ids, st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_chunked_decoding_equals_complete_decoding(ids: list[int], lengths: list[int]) -> None:
    detokenizer = demo_text().detokenizer()
    pieces = [detokenizer.feed(chunk) for chunk in cut(ids, lengths)]
    assert "".join(pieces) + detokenizer.flush() == demo_text().decode(ids)


@given(st.text(max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_pieces_never_split_a_character(text: str, lengths: list[int]) -> None:
    detokenizer = demo_text().detokenizer()
    pieces = [detokenizer.feed(chunk) for chunk in cut(demo_text().encode(text), lengths)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == text
    assert "�" in text or not any("�" in piece for piece in pieces)


def test_incomplete_character_is_withheld_then_replaced() -> None:
    ids = demo_text().encode("😀")
    assert len(ids) == 4
    detokenizer = demo_text().detokenizer()
    assert [detokenizer.feed([i]) for i in ids[:3]] == ["", "", ""]
    assert detokenizer.flush() == "�"


@pytest.mark.parametrize("text", ["a", "é", "漢", "👩‍👩‍👧", "Z͑ͫ̓", "\x00\n\t", "<|end|>x"])
def test_token_bytes_join_to_the_text(text: str) -> None:
    ids = demo_text().encode(text)
    assert b"".join(demo_text().token_bytes(i) for i in ids) == text.encode()


def find_stop_by_character(text: str, stops: Sequence[str], included: bool) -> tuple[str, bool]:
    """The reference: reads one character at a time."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return text[: end if included else end - len(max(done, key=len))], True
    return text, False


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.booleans(),
)
def test_stop_matcher_result_does_not_depend_on_chunks(
    text: str, stops: list[str], lengths: list[int], included: bool
) -> None:
    matcher, out, found = StopMatcher(stops, included), "", False
    for chunk in cut([ord(c) for c in text], lengths):
        safe, found = matcher.feed("".join(map(chr, chunk)))
        out += safe
        if found:
            break
    out += "" if found else matcher.flush()
    assert (out, found) == find_stop_by_character(text, stops, included)


def test_stop_matcher_withholds_only_possible_beginnings() -> None:
    matcher = StopMatcher(["END", "\n\n"])
    assert matcher.feed("the E") == ("the ", False)
    assert matcher.feed("N") == ("", False)
    assert matcher.feed("x\n") == ("ENx", False)
    assert matcher.feed("y") == ("\ny", False)
    assert matcher.feed("EN") == ("", False)
    assert matcher.feed("D and more") == ("", True)


def test_conversation_is_rendered_by_the_model_s_template() -> None:
    ids = demo_text().encode_chat([{"role": "user", "content": "hi"}])
    rendered = demo_text().backend.decode(ids, skip_special_tokens=False)
    assert rendered == "<|user|>hi<|end|><|assistant|>"


def test_template_error_keeps_the_template_s_message() -> None:
    with pytest.raises(TemplateError, match="Unknown role: wizard"):
        demo_text().encode_chat([{"role": "wizard", "content": "x"}])


def test_missing_chat_template_is_an_error(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(TemplateError, match="no chat template"):
        Text(str(tmp_path)).encode_chat([{"role": "user", "content": "x"}])


def test_context_and_vocabulary_come_from_the_model_config(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(str(tmp_path))
    config = {"model_type": "llama", "max_position_embeddings": 77, "vocab_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = Text(str(tmp_path))
    assert (text.context_tokens, text.vocabulary_tokens) == (77, 2048)


def test_broken_model_folder_is_a_one_line_config_error(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    (broken := tmp_path / "broken").mkdir()
    (broken / "tokenizer.json").write_text("{")
    (listed := tmp_path / "listed").mkdir()
    make_tokenizer().save_pretrained(str(listed))
    (listed / "config.json").write_text("[]")
    for folder in (tmp_path / "missing", empty, broken, listed):
        with pytest.raises(ConfigError, match=r"gateway\.model") as caught:
            Text(str(folder))
        assert "\n" not in str(caught.value)
    assert Text(demo_folder()).vocabulary_tokens == VOCABULARY


def test_tokenizer_of_another_model_is_a_config_error(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokens = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    tokenizer.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": tokens - 1}))
    with pytest.raises(ConfigError) as caught:
        Text(str(tmp_path))
    assert str(caught.value) == (
        f"gateway.model: the tokenizer in {tmp_path} has {tokens} tokens, but the model only "
        f"{tokens - 1} (vocab_size in config.json): copy the files of this model's own tokenizer"
    )


def test_tokenizer_without_a_vocabulary_is_a_config_error(tmp_path: Path) -> None:
    Tokenizer(tokenizer_models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"turns a text into no tokens: copy the files of"):
        Text(str(tmp_path))


def test_added_token_without_an_embedding_is_refused_per_request(tmp_path: Path) -> None:
    """As an image token that a model's text part does not have."""
    tokenizer = make_tokenizer()
    tokens = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(str(tmp_path))
    config = {"text_config": {"vocab_size": tokens}}  # the text part of a multimodal model
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = Text(str(tmp_path))
    assert list(tokenize_prompt(text, ClientRequest(prompt="hi"))) == text.encode("hi")
    with pytest.raises(InvalidArgument) as caught:
        tokenize_prompt(text, ClientRequest(prompt="hi <image>"))
    assert "has '<image>', which the model has no embedding for" in str(caught.value)


SPECIALS = [demo_text().encode(f"<|{name}|>")[0] for name in ("end", "user", "assistant")]
END, USER, ASSISTANT = SPECIALS
ids_with_specials = st.lists(
    st.one_of(st.integers(0, VOCABULARY - 1), st.sampled_from(SPECIALS)), max_size=40
)


def sampling_with(**fields: Any) -> Sampling:
    return Sampling(seed=0, max_tokens=99, **fields)


@given(
    ids_with_specials,
    st.lists(st.integers(1, 7), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from([frozenset(), frozenset((USER, 40))]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_chunked_decoding_equals_complete_decoding_with_all_options(
    ids: list[int], lengths: list[int], skip: bool, stops: frozenset[int], ignore: bool,
    include: bool, stopped: bool,
) -> None:  # fmt: skip
    """The reference decodes all tokens at once, without the one that ended the answer."""
    sampling = sampling_with(
        skip_special_tokens=skip, stop_token_ids=stops, ignore_eos=ignore,
        include_stop_str_in_output=include,
    )  # fmt: skip
    detokenizer = demo_text().detokenizer(sampling)
    pieces = [detokenizer.feed(chunk) for chunk in cut(ids, lengths)]
    enders = stops | (frozenset() if ignore else frozenset((END,)))
    silent = ids and ids[-1] in enders and stopped and not include
    whole = demo_text().decode(ids[:-1] if silent else ids, skip)
    assert "".join(pieces) + detokenizer.flush(stopped) == whole


def byte_level_tokenizer() -> Tokenizer:
    """Every byte is a token; added ones are within and outside the byte-level alphabet."""
    backend = Tokenizer(tokenizer_models.BPE({c: at for at, c in enumerate(sorted(BYTE_OF))}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "漢é"])
    backend.add_tokens(["é", "two words", "…"])
    return backend


@given(st.lists(st.integers(0, 262), max_size=40), st.lists(st.integers(1, 7), min_size=1))
def test_byte_level_answers_decode_as_the_library_decodes_them(
    ids: list[int], lengths: list[int]
) -> None:
    """Invalid UTF-8, unknown ids and added tokens included."""
    backend = byte_level_tokenizer()
    assert is_byte_level(backend)
    for skip, skipped in ((False, frozenset()), (True, frozenset(("<end>", "漢é")))):
        detokenizer = ByteDetokenizer(ByteTokens(backend, skipped))
        pieces = [detokenizer.feed(chunk) for chunk in cut(ids, lengths)]
        whole = backend.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces) + detokenizer.flush() == whole


def test_byte_level_characters_are_complete() -> None:
    backend = byte_level_tokenizer()
    detokenizer = ByteDetokenizer(ByteTokens(backend))
    characters = {byte: character for character, byte in BYTE_OF.items()}
    vocabulary = backend.get_vocab()
    ids = [vocabulary[characters[byte]] for byte in "ü!é".encode()]
    assert [detokenizer.feed([token]) for token in ids] == ["", "ü", "!", "", "é"]
    assert (detokenizer.feed(ids[:1]), detokenizer.flush(), detokenizer.flush()) == (
        "",
        "\ufffd",
        "",
    )


def test_stop_token_within_an_answer_is_text() -> None:
    detokenizer = demo_text().detokenizer(sampling_with(stop_token_ids=frozenset(tokens_of("2"))))
    assert [detokenizer.feed(tokens_of(c)) for c in "122"] == ["1", "", "2"]
    assert detokenizer.flush(stopped=False) == "2"


def test_spaces_between_special_tokens_are_optional() -> None:
    """With a tokenizer that joins tokens by spaces."""
    vocabulary = {"<a>": 0, "<b>": 1, "x": 2, "?": 3}
    words = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="?"))
    words.add_special_tokens(["<a>", "<b>"])
    specials = {0: "<a>", 1: "<b>"}
    for unspaced, text in ((None, "<a> <b> x <a> <b>"), (specials, "<a><b> x <a><b>")):
        for lengths in ([1], [2], [5]):
            detokenizer = Detokenizer(words, False, frozenset(), unspaced)
            pieces = [detokenizer.feed(chunk) for chunk in cut([0, 1, 2, 0, 1], lengths)]
            assert "".join(pieces) + detokenizer.flush() == text
    assert (
        demo_text().detokenizer(sampling_with(spaces_between_special_tokens=False)).feed([40]) != ""
    )


def test_spell_word_covers_start_and_after_space() -> None:
    text = demo_text()
    assert list(text.spell_word("apple")) == [text.encode("apple"), text.encode(" apple")]
    assert list(text.spell_word(" apple")) == list(text.spell_word("apple"))
    unknown = text.encode("漢")  # after a space: the same tokens after a token for the space
    assert list(text.spell_word("漢")) == [unknown]


def test_end_tokens_are_read_as_the_worker_reads_them(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(str(tmp_path))
    assert Text(str(tmp_path)).eos_ids == {END}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "vocab_size": 2048}))
    assert Text(str(tmp_path)).eos_ids == {7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    text = Text(str(tmp_path))
    assert text.eos_ids == {8, 9}
    detokenizer = text.detokenizer()
    assert detokenizer.feed([40, 8]) + detokenizer.flush(stopped=True) == text.decode([40])
